package transport

import (
	"net/netip"
	"slices"
	"testing"
)

func TestCandidates(t *testing.T) {
	prefixes := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	mac := []Interface{
		{Name: "lo0", Up: true, Loopback: true, Addresses: prefixes("127.0.0.1/8", "::1/128", "fe80::1/64")},
		{Name: "awdl0", Up: true, Addresses: prefixes("169.254.9.9/16")},
		{Name: "utun3", Up: true, PointToPoint: true, Addresses: prefixes("10.8.0.2/24")},
		{Name: "en0", Up: true, Addresses: prefixes("fe80::2/64", "2001:db8::2/64", "192.168.1.2/24")},
		{Name: "bridge0", Up: true, Addresses: prefixes("169.254.1.2/16", "10.0.0.2/24")},
		{Name: "en7", Addresses: prefixes("192.168.9.2/24")},
	}
	linux := []Interface{
		{Name: "docker0", Up: true, Addresses: prefixes("172.17.0.1/16")},
		{Name: "br-3f2a", Up: true, Addresses: prefixes("172.18.0.1/16")},
		{Name: "p2p1", Up: true, Addresses: prefixes("192.168.1.3/24")}, // a port of a card, by its place
		{Name: "p2p-wlan0", Up: true, Addresses: prefixes("192.168.49.1/24")},
		{Name: "wg0", Up: true, PointToPoint: true, Addresses: prefixes("10.9.0.1/24")},
		{Name: "eth0", Up: true, Addresses: prefixes("10.1.0.3/24", "10.1.0.3/24")},
		{Name: "lo", Up: true, Loopback: true, Addresses: prefixes("127.0.0.1/8")},
	}
	for _, tc := range []struct {
		name       string
		listener   string
		interfaces []Interface
		want       []string
	}{
		{"bound to one address", "192.168.1.2:19001", mac, []string{"192.168.1.2:19001"}},
		{"bound to loopback", "127.0.0.1:19001", mac, []string{"127.0.0.1:19001"}},
		{"macOS", "[::]:19001", mac, []string{
			"192.168.1.2:19001", "10.0.0.2:19001", "[2001:db8::2]:19001", "169.254.1.2:19001", "10.8.0.2:19001", "127.0.0.1:19001", "[::1]:19001",
		}},
		{"IPv4 only", "0.0.0.0:19001", mac, []string{"192.168.1.2:19001", "10.0.0.2:19001", "169.254.1.2:19001", "10.8.0.2:19001", "127.0.0.1:19001"}},
		{"Linux", "0.0.0.0:1", linux, []string{"192.168.1.3:1", "10.1.0.3:1", "172.17.0.1:1", "172.18.0.1:1", "10.9.0.1:1", "127.0.0.1:1"}},
	} {
		var got []string
		for _, a := range Candidates(netip.MustParseAddrPort(tc.listener), tc.interfaces) {
			got = append(got, a.String())
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
	for _, i := range mac {
		if want := i.Name == "utun3" || i.Name == "en0" || i.Name == "bridge0"; i.Usable() != want {
			t.Errorf("%s: usable %v", i.Name, i.Usable())
		}
	}
}

// This host has a loopback interface at least.
func TestInterfaces(t *testing.T) {
	list, err := Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(list, func(i Interface) bool { return i.Loopback && len(i.Addresses) > 0 }) {
		t.Errorf("%+v", list)
	}
}
