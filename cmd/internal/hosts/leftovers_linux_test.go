package hosts

import (
	"net/netip"
	"reflect"
	"strings"
	"syscall"
	"testing"
)

func TestLeftoversAreFound(t *testing.T) {
	each(t, func(t *testing.T, n *Network) {
		h := n.Hosts[1]
		idle := actor(t, n.Hosts[0], "tcp="+n.Hosts[0].LAN(8000), "log=ready")
		idle.Await(t, Says("ready"))
		before := n.Snapshot(t)
		for name, tc := range map[string]struct {
			plant string
			kind  Kind
			says  string
			stays bool // when the process that planted it has gone
			apart bool // only where hosts are namespaces
		}{
			"TCP port":           {plant: "tcp=" + h.LAN(8001), kind: KindPort, says: "tcp " + h.LAN(8001)},
			"wildcard port":      {plant: "tcp=:0", kind: KindPort, says: "[::]:"},
			"UDP port":           {plant: "udp=" + h.LAN(8002), kind: KindPort, says: "udp " + h.LAN(8002)},
			"open memory":        {plant: "memfd=mlxcel-region", kind: KindMemory, says: "/memfd:mlxcel-region (inode "},
			"mapped memory":      {plant: "mapped=mlxcel-region", kind: KindMemory, says: "/memfd:mlxcel-region (inode "},
			"shared-memory file": {plant: "file=/dev/shm/planted", kind: KindMemory, says: "/dev/shm/planted", stays: true, apart: true},
			"temporary file":     {plant: "temp=planted", kind: KindFile, says: "planted", stays: true},
			"process":            {plant: "log=x", kind: KindProcess, says: program(t, "")},
			"process of its own": {plant: "orphan=" + program(t, "plugins/orphan"), kind: KindProcess, says: "plugins/orphan", stays: true},
		} {
			if tc.apart && n.bridge == nil {
				continue
			}
			t.Run(name, func(t *testing.T) {
				p := actor(t, h, tc.plant, "log=planted")
				p.Await(t, Says("planted"))
				found := func() bool {
					for _, thing := range n.Snapshot(t).Beyond(before) {
						if thing.Kind == tc.kind && strings.Contains(thing.What, tc.says) {
							return true
						}
					}
					return false
				}
				if !found() {
					t.Errorf("not found: %s", n.Snapshot(t).Beyond(before))
				}
				p.Signal(t, syscall.SIGKILL)
				p.Exit(t)
				if found() != tc.stays {
					t.Errorf("after the process's end found is %v: %s", found(), n.Snapshot(t).Beyond(before))
				}
				if err := n.left(before, []Kind{tc.kind}); (err != nil) != tc.stays {
					t.Errorf("the check says %v", err)
				}
				before = append(before, n.Snapshot(t).Beyond(before)...)
			})
		}
		n.CheckNothingLeft(t, before)
		idle.Signal(t, syscall.SIGKILL)
		idle.Exit(t)
		n.CheckNothingLeft(t, nil, KindPort)
	})
}

// What a network made is gone when it is closed, orphans too.
func TestCloseLeavesNothing(t *testing.T) {
	var was *Network
	t.Run("inner", func(t *testing.T) {
		was = Loopback(t, "a")
		p := actor(t, was.Hosts[0], "orphan="+program(t, "plugins/orphan"), "log=done")
		p.Await(t, Says("done"))
		if found := was.Snapshot(t); len(found) < 2 {
			t.Errorf("%v", found)
		}
	})
	if err := retry(func() error { return was.left(nil, []Kind{KindProcess, KindPort}) }); err != nil {
		t.Error(err)
	}
}

func TestParseSockets(t *testing.T) {
	const header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	tcp := header +
		"   0: 0100007F:4A38 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0\n" +
		"   1: 0100007F:4A38 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1\n"
	got, err := parseSockets("tcp", tcp)
	want := []socket{{"tcp", netip.MustParseAddrPort("127.0.0.1:19000"), "4711"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v %v, want %v", got, err, want)
	}
	tcp6 := header +
		"   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9 1 0 100 0 0 10 0\n"
	got, err = parseSockets("tcp6", tcp6)
	want = []socket{{"tcp6", netip.MustParseAddrPort("[::1]:80"), "9"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v %v, want %v", got, err, want)
	}
	for _, bad := range []string{"0: x\n", strings.Replace(tcp, "0100007F:4A38", "zz:4A38", 1)} {
		if got, err := parseSockets("tcp", header+bad); err == nil && len(got) != 1 || strings.HasPrefix(bad, "0: x") && err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}
