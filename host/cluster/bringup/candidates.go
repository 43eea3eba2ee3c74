package bringup

import (
	"net/netip"
	"slices"
)

// candidates are the addresses at which a stage dials the next, the likeliest first: the one at which the coordinator reached
// it, then those that it offers. Loopback addresses mean something on the same machine only, and there they come first.
func candidates(from, to Learned) []string {
	same := from.Machine != "" && from.Machine == to.Machine
	var local, others []string
	for _, a := range append([]string{to.Reached}, to.Addresses...) {
		switch {
		case a == "" || slices.Contains(local, a) || slices.Contains(others, a):
		case !isLoopback(a):
			others = append(others, a)
		case same:
			local = append(local, a)
		}
	}
	return append(local, others...)
}

// isLoopback tells for an address of numbers; a name is not looked up.
func isLoopback(address string) bool {
	a, err := netip.ParseAddrPort(address)
	return err == nil && a.Addr().Unmap().IsLoopback()
}
