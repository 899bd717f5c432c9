// Package cluster has three metadata services on a catalog in three etcd members, and does harm to them while clients work: nobody gets an error, a
// wrong answer or an old one, and nothing that was answered is lost. TestOutage does it step by step, and says what goes on meanwhile and what waits; TestPromotion
// has PostgreSQL in place of etcd. TestLoss says what each loss costs those who wait.
//
//	go test ./test/cluster -run TestChaos -args -duration 1h
//
// Any other suite of whole systems runs on such a volume with WEFT_TEST_CLUSTER=1, and while harm is done with WEFT_TEST_CLUSTER=chaos.
package cluster
