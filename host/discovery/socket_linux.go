package discovery

import (
	"context"
	"net"
	"net/netip"
)

// loopbackTarget reaches every listener of this host, not one of them only.
var loopbackTarget = netip.AddrFrom4([4]byte{127, 255, 255, 255})

// openSender returns a socket bound to an address. Linux sends broadcasts over the interface that has the source address.
func openSender(_ string, local netip.Addr) (Sender, error) {
	var lc net.ListenConfig
	return lc.ListenPacket(context.Background(), "udp4", netip.AddrPortFrom(local, 0).String())
}
