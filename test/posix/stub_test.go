package posix

func aclChecks() []check   { return nil }
func dirChecks() []check   { return nil }
func otherChecks() []check { return nil }
func longChecks() []check  { return nil }

var differences []difference
