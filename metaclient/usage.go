package metaclient

import (
	"slices"
	"time"

	"github.com/weftfs/weft/internal/wire/metarpc"
	"github.com/weftfs/weft/layout"
)

// DefaultUsagePeriod is how often is reported what was done at devices.
const DefaultUsagePeriod = time.Minute

// reportUsage reports again and again what was done at devices since the last time. What nobody has used is not reported, and a
// report that the service does not take is not made up for.
func (c *Client) reportUsage() {
	before := map[layout.DeviceID]metarpc.DeviceStats{}
	began := time.Now()
	for sleep(c.ctx, c.cfg.UsagePeriod) {
		now := time.Now()
		var report []metarpc.DeviceStats
		for _, st := range c.cfg.Usage() {
			last := before[st.Device]
			before[st.Device] = st
			st.Reads, st.Writes = grown(st.Reads, last.Reads), grown(st.Writes, last.Writes)
			if st.Reads.Ops > 0 || st.Writes.Ops > 0 || st.Outstanding > 0 {
				report = append(report, st)
			}
		}
		span := int64(now.Sub(began))
		began = now
		for devices := range slices.Chunk(report, metarpc.MaxBatch) {
			args := &metarpc.LayoutStatsArgs{Span: span, Devices: devices}
			if err := c.do(c.ctx, metarpc.OpLayoutStats, metarpc.Cred{}, args, nil, nil); err != nil && c.ctx.Err() == nil {
				c.log.Warn("metadata service: report of what was done at data servers", "err", err)
			}
		}
	}
}

// grown is what has been added to last.
func grown(total, last metarpc.IOStats) metarpc.IOStats {
	return metarpc.IOStats{Ops: total.Ops - last.Ops, Bytes: total.Bytes - last.Bytes, Time: total.Time - last.Time}
}
