package discovery

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/mlxcel/mlxcel/host/securelink"
)

func secret(t testing.TB, text string) securelink.Secret {
	t.Helper()
	s, err := securelink.NewSecret([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	ourSecret   = "sixteen bytes at least"
	theirSecret = "another one, as long.."
)

// TestTracker runs the files of testdata/tracker against the tracker of cluster "pp", whose secret all beacons have unless they
// say otherwise. Times are seconds from the start, by the tracker's clock.
//
//	beacon t=<s> id=<id> [boot=<n>] [count=<n>] [from=<ip>] [signed=<ip>] [port=<n>] [clock=<s off>] [cluster=<name>] [secret=other] [flip=<bit>]
//	raw t=<s> from=<ip>       the input's text as a datagram
//	report t=<s> want=<n>
func TestTracker(t *testing.T) {
	datadriven.Walk(t, "testdata/tracker", func(t *testing.T, path string) {
		tracker, err := NewTracker(TrackerConfig{Secret: secret(t, ourSecret), Cluster: "pp"})
		if err != nil {
			t.Fatal(err)
		}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var at float64
			d.ScanArgs(t, "t", &at)
			now := time.Unix(1_800_000_000, 0).Add(time.Duration(at * float64(time.Second)))
			switch d.Cmd {
			case "beacon":
				b, from := scanBeacon(t, d, now)
				return outcome(tracker.Observe(now, from, b))
			case "raw":
				return outcome(tracker.Observe(now, source(t, d), []byte(d.Input)))
			case "report":
				var want int
				d.ScanArgs(t, "want", &want)
				return strings.ReplaceAll(tracker.Report(now, want).String(), "; ", "\n") + "\n"
			}
			t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
			return ""
		})
	})
}

func outcome(o Outcome, r Reason) string {
	if r != "" {
		return fmt.Sprintf("%s: %s\n", o, r)
	}
	return string(o) + "\n"
}

func source(t *testing.T, d *datadriven.TestData) netip.AddrPort {
	text := "10.0.0.1"
	d.MaybeScanArgs(t, "from", &text)
	return netip.AddrPortFrom(netip.MustParseAddr(text), 50000)
}

func scanBeacon(t *testing.T, d *datadriven.TestData, now time.Time) ([]byte, netip.AddrPort) {
	from := source(t, d)
	b := Beacon{Cluster: "pp", Version: "1.0"}
	var boot, clock, flip int
	port, signed, with := 19001, from.Addr().String(), ""
	d.ScanArgs(t, "id", &b.NodeID)
	for key, dest := range map[string]any{"boot": &boot, "count": &b.Counter, "signed": &signed, "port": &port, "clock": &clock, "cluster": &b.Cluster, "secret": &with} {
		d.MaybeScanArgs(t, key, dest)
	}
	b.Boot[0] = byte(boot)
	b.Time = now.Add(time.Duration(clock) * time.Second).UnixMilli()
	b.Address = netip.AddrPortFrom(netip.MustParseAddr(signed), uint16(port))
	key := secret(t, ourSecret).Key(keyPurpose)
	if with == "other" {
		key = secret(t, theirSecret).Key(keyPurpose)
	}
	out, err := b.Encode(key)
	if err != nil {
		t.Fatalf("%s: %v", d.Pos, err)
	}
	if d.MaybeScanArgs(t, "flip", &flip) {
		out[flip/8] ^= 1 << (flip % 8)
	}
	return out, from
}

// Every single changed bit makes a beacon count for nothing.
func TestEveryBitIsSigned(t *testing.T) {
	tracker, err := NewTracker(TrackerConfig{Secret: secret(t, ourSecret), Cluster: "pp"})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_800_000_000, 0)
	from := netip.MustParseAddrPort("10.0.0.1:50000")
	b := Beacon{NodeID: "a", Cluster: "pp", Address: netip.MustParseAddrPort("10.0.0.1:19001"), Counter: 1, Time: now.UnixMilli()}
	good, err := b.Encode(secret(t, ourSecret).Key(keyPurpose))
	if err != nil {
		t.Fatal(err)
	}
	for bit := range len(good) * 8 {
		bad := append([]byte(nil), good...)
		bad[bit/8] ^= 1 << (bit % 8)
		if o, _ := tracker.Observe(now, from, bad); o != Ignored {
			t.Errorf("bit %d changed: %s", bit, o)
		}
	}
	if o, r := tracker.Observe(now, from, good); o != Found {
		t.Fatalf("unchanged: %s %s", o, r)
	}
}

// What somebody without the secret sends takes no memory without bound, and somebody with it neither.
func TestTrackerIsBounded(t *testing.T) {
	tracker, err := NewTracker(TrackerConfig{Secret: secret(t, ourSecret), Cluster: "pp"})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1_800_000_000, 0)
	ours, theirs := secret(t, ourSecret).Key(keyPurpose), secret(t, theirSecret).Key(keyPurpose)
	for i := range MaxNodes + 500 {
		address := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 1)
		b := Beacon{NodeID: fmt.Sprint("n", i), Cluster: "pp", Address: address, Counter: 1, Time: now.UnixMilli()}
		for _, key := range [][]byte{ours, theirs} {
			datagram, err := b.Encode(key)
			if err != nil {
				t.Fatal(err)
			}
			tracker.Observe(now, address, datagram)
		}
	}
	if len(tracker.nodes) != MaxNodes || len(tracker.refused) != maxRefused {
		t.Errorf("%d nodes, want %d; %d refused, want %d", len(tracker.nodes), MaxNodes, len(tracker.refused), maxRefused)
	}
	if r := tracker.Report(now, 1); r.Others == 0 {
		t.Error("the refused beacons that are not listed are not counted")
	}
	later := now.Add(2 * time.Minute)
	tracker.Report(later, 1)
	if len(tracker.nodes) != 0 || len(tracker.refused) != 0 {
		t.Errorf("after two minutes %d nodes and %d refused are still kept", len(tracker.nodes), len(tracker.refused))
	}
}

func TestWindow(t *testing.T) {
	var w window
	for _, step := range []struct {
		counter uint64
		want    bool
	}{{100, true}, {100, false}, {101, true}, {99, true}, {99, false}, {38, true}, {37, false}, {164, true}, {101, false}, {100, false}, {102, true}, {1 << 63, true}, {164, false}, {1<<64 - 1, true}, {1<<64 - 1, false}, {0, false}} {
		if got := w.take(step.counter); got != step.want {
			t.Errorf("counter %d: %v, want %v", step.counter, got, step.want)
		}
	}
}

func TestBeaconRefusesWhatNobodyCanUse(t *testing.T) {
	good := Beacon{NodeID: "a", Cluster: "pp", Version: "1", Address: netip.MustParseAddrPort("10.0.0.1:1")}
	for name, change := range map[string]func(*Beacon){
		"no node id":        func(b *Beacon) { b.NodeID = "" },
		"long node id":      func(b *Beacon) { b.NodeID = strings.Repeat("x", 65) },
		"long cluster":      func(b *Beacon) { b.Cluster = strings.Repeat("x", 65) },
		"long version":      func(b *Beacon) { b.Version = strings.Repeat("x", 33) },
		"control character": func(b *Beacon) { b.Cluster = "a\x1b[2J" },
		"no UTF-8":          func(b *Beacon) { b.Version = "\xff" },
		"wildcard":          func(b *Beacon) { b.Address = netip.MustParseAddrPort("0.0.0.0:1") },
		"port 0":            func(b *Beacon) { b.Address = netip.MustParseAddrPort("10.0.0.1:0") },
	} {
		b := good
		change(&b)
		if _, err := b.Encode([]byte("key")); err == nil {
			t.Errorf("%s: encoded", name)
		}
	}
	if _, err := good.Encode([]byte("key")); err != nil {
		t.Error(err)
	}
}
