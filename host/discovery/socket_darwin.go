package discovery

import (
	"context"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// loopbackTarget is the host itself: the loopback interface has no broadcasts on macOS.
var loopbackTarget = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// openSender returns a socket bound to an address and its interface: by itself macOS sends limited broadcasts over the first
// interface only.
func openSender(name string, local netip.Addr) (Sender, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		i, lookup := net.InterfaceByName(name)
		if lookup != nil {
			return nil // a path that a route chose has no interface's name
		}
		control := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BOUND_IF, i.Index)
		})
		if control != nil {
			return control
		}
		return err
	}}
	return lc.ListenPacket(context.Background(), "udp4", netip.AddrPortFrom(local, 0).String())
}
