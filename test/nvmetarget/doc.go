// Package nvmetarget makes an NVMe/TCP target misbehave, for tests of initiators: a proxy between host and target that takes the
// target's PDUs apart and lets rules send others in their place, none, more, later, or bytes that are no PDU.
//
// Some rules do what a target may do, and the target of package server/nvme does not: a host must not notice. They are MaxH2CData,
// Align, SplitR2T, SplitData and Delay. All others break the protocol; they are to be used by Nth or by When, so that a host comes as
// far as the test wants. Rules are chained: what one sends goes to the next, and what the last one sends to the host.
//
// What the host sends is passed on, adapted to what the target has to see for the rules to work.
package nvmetarget
