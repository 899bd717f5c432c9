package cluster

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootTime is a clock that nobody sets and that goes on while the machine is suspended, which the monotonic clock of package time does not
// (CLOCK_BOOTTIME, clock_gettime(2)). Both go on while the process is stopped (SIGSTOP).
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("cluster: no CLOCK_BOOTTIME: " + err.Error()) // Linux 2.6.39
	}
	return time.Duration(ts.Nano())
}
