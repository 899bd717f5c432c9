// Package screens looks at what people see: weft top and weft status in terminals of two sizes, and what they say of a mount that hangs.
package screens
