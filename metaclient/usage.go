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
func (v *Volume) reportUsage() {
	before := map[layout.DeviceID]metarpc.DeviceStats{}
	began := time.Now()
	for sleep(v.ctx, v.cfg.UsagePeriod) {
		now := time.Now()
		var report []metarpc.DeviceStats
		for _, st := range v.cfg.Usage() {
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
			if err := v.any().do(v.ctx, metarpc.OpLayoutStats, metarpc.Cred{}, args, nil, nil); err != nil && v.ctx.Err() == nil {
				v.log.Warn("metadata service: report of what was done at data servers", "err", err)
			}
		}
	}
}

// grown is what has been added to last.
func grown(total, last metarpc.IOStats) metarpc.IOStats {
	return metarpc.IOStats{Ops: total.Ops - last.Ops, Bytes: total.Bytes - last.Bytes, Time: total.Time - last.Time}
}
