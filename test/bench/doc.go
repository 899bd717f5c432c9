// Command bench measures weft against baselines that run in the same minutes, in turn with it: absolute figures of a
// shared machine mean nothing, ratios do. scripts/bench installs and builds what it needs.
//
// A row has a fixed name. Each repeat measures weft and the baseline one after the other; the figures shown are medians,
// the ratio is the median of the repeats' ratios, and the spread is that of the ratios. Rows whose operations are
// durable before they are answered also show the disk's own floor, an fdatasync of 512 bytes, from the same repeats.
package main
