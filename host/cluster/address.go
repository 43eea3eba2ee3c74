package cluster

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Address is where a node listens, as text that its operator chose and that every file keeps.
type Address struct {
	Host string // a name, or an IP address without brackets; empty is a wildcard
	Port int    // 0 lets the system choose
	text string
}

// AddressError is a text that is no usable address.
type AddressError struct {
	Text   string
	Reason string
}

func (e *AddressError) Error() string {
	return fmt.Sprintf("%q is no address: %s: give host:port, e.g. 192.168.1.11:19001, [fd00::11]:19001 or studio-2.local:19001", e.Text, e.Reason)
}

// ParseAddress reads host:port. An IPv6 address is in brackets. Wildcards and port 0 are addresses to listen on, never
// to be reached at: Reachable tells.
func ParseAddress(text string) (Address, error) {
	fault := func(reason string) (Address, error) { return Address{}, &AddressError{text, reason} }
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		if _, err := netip.ParseAddr(text); err == nil || !strings.Contains(text, ":") {
			return fault("the port is missing")
		}
		return fault("it is not host:port; an IPv6 address takes brackets")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || port != strconv.FormatUint(n, 10) {
		return fault(fmt.Sprintf("port %q is not a number from 0 to 65535", port))
	}
	bracketed := strings.HasPrefix(text, "[")
	if _, err := netip.ParseAddr(host); err != nil && (bracketed || host != "" && !isHostName(host)) {
		return fault(fmt.Sprintf("%q is neither an IP address nor a host name", host))
	} else if err == nil && bracketed != strings.Contains(host, ":") {
		return fault("brackets are for IPv6 addresses")
	}
	return Address{Host: host, Port: int(n), text: text}, nil
}

// isHostName takes RFC 1123 names. One whose last label is a number is a mistyped IPv4 address.
func isHostName(s string) bool {
	s = strings.TrimSuffix(s, ".")
	labels := strings.Split(s, ".")
	for _, label := range labels {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			if !isAlphanumeric(c) && c != '-' && c != '_' {
				return false
			}
		}
	}
	last := labels[len(labels)-1]
	return len(s) <= 253 && strings.Trim(last, "0123456789") != ""
}

func isAlphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// String returns the text as it was given.
func (a Address) String() string {
	if a.text == "" {
		return net.JoinHostPort(a.Host, strconv.Itoa(a.Port))
	}
	return a.text
}

// IP returns the address's IP; !ok for a name or an empty host.
func (a Address) IP() (netip.Addr, bool) {
	ip, err := netip.ParseAddr(a.Host)
	return ip.Unmap(), err == nil
}

// Key is equal for all texts of one address. A name and the address that it resolves to have different keys.
func (a Address) Key() string {
	host := strings.ToLower(strings.TrimSuffix(a.Host, "."))
	if ip, ok := a.IP(); ok {
		host = ip.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(a.Port))
}

// Wildcard tells whether the host is every address of this machine.
func (a Address) Wildcard() bool {
	ip, ok := a.IP()
	return a.Host == "" || ok && ip.IsUnspecified()
}

// Reachable says why nobody can reach the address, nil if somebody may.
func (a Address) Reachable() error {
	ip, isIP := a.IP()
	switch {
	case a.Wildcard():
		return &AddressError{a.String(), "a wildcard is an address to listen on, not one to reach a node at"}
	case isIP && (ip.IsMulticast() || ip == netip.AddrFrom4([4]byte{255, 255, 255, 255})):
		return &AddressError{a.String(), "it is no single machine's"}
	case a.Port == 0:
		return &AddressError{a.String(), "port 0 is chosen by the system at each start"}
	}
	return nil
}

// withHost returns the address with another host and the same port.
func (a Address) withHost(ip netip.Addr) Address {
	return Address{Host: ip.String(), Port: a.Port}
}

// overlaps tells whether two addresses can't both be listened on by one machine.
func (a Address) overlaps(b Address) bool {
	return a.Port != 0 && a.Port == b.Port && (a.Wildcard() || b.Wildcard() || a.Key() == b.Key())
}
