package catalog

// Room is how much space a store has. The zero value is that of a store of which it is not known.
type Room struct {
	Free    int64 // bytes, without the reserve
	Size    int64 // bytes of the whole store; 0: not known
	Reserve int64 // bytes that the engine keeps for batches without Grows
	Low     bool  // the store will soon be full
	Full    bool  // only the reserve is left: batches with Grows are refused
}

// Roomy is an engine that keeps a reserve of its store's space. It logs when the store becomes full or nearly full, and
// when it has room again.
type Roomy interface {
	Room() Room
}

// RoomOf returns the room of the store of an engine, or of the engine that it wraps.
func RoomOf(e Engine) Room {
	for {
		if roomy, ok := e.(Roomy); ok {
			return roomy.Room()
		}
		outer, ok := e.(interface{ Unwrap() Engine })
		if !ok {
			return Room{}
		}
		e = outer.Unwrap()
	}
}
