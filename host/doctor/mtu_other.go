//go:build !linux

package doctor

import "net"

// connMTU returns 0: the system does not tell.
func connMTU(*net.TCPConn) (int, error) { return 0, nil }
