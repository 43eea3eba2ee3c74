package doctor

import (
	"io/fs"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
)

const heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"

// line is a socket as a little-endian kernel prints it.
func line(local, state, inode string) string {
	return "   0: " + local + " 00000000:0000 " + state + " 00000000:00000000 00:00000000 00000000     0        0 " + inode + " 1 0000 100 0\n"
}

func text(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }

func link(to string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(to), Mode: fs.ModeSymlink} }

func proc() fstest.MapFS {
	return fstest.MapFS{
		"net/tcp": text(heading +
			line("0100007F:4A38", "0A", "11") + // 127.0.0.1:19000 listens
			line("0A01A8C0:4A39", "0A", "12") + // 192.168.1.10:19001 listens
			line("0100007F:4A3A", "01", "13") + // 127.0.0.1:19002 is connected
			line("0100007F:4A3B", "0A", "14")), // 127.0.0.1:19003, of somebody else
		"net/tcp6": text(heading + line("00000000000000000000000000000000:4A3C", "0A", "15")), // [::]:19004
		"net/udp":  text(heading + line("00000000:C193", "07", "16")),                         // 0.0.0.0:49555
		"net/udp6": text(heading),
		"1/comm":   text("init\n"),
		"7/comm":   text("mlxcel-server\n"), "7/fd/0": link("/dev/null"), "7/fd/5": link("socket:[11]"),
		"8/comm": text("web server\n"), "8/fd/3": link("socket:[12]"), "8/fd/4": link("socket:[13]"),
		"9/comm": text("six\n"), "9/fd/3": link("socket:[15]"), "9/fd/4": link("socket:[16]"),
		"self/comm": text("test\n"),
	}
}

func TestHolder(t *testing.T) {
	for _, tc := range []struct {
		network, at string
		want        string // the process, or part of the error
	}{
		{"tcp", "127.0.0.1:19000", "mlxcel-server (pid 7)"},
		{"tcp", "0.0.0.0:19000", "mlxcel-server (pid 7)"},
		{"tcp", "[::]:19001", "web server (pid 8)"},
		{"tcp", "127.0.0.1:19001", "let go of it"}, // the same port of another address
		{"tcp", "127.0.0.1:19002", "let go of it"}, // a connection, no listener
		{"tcp", "127.0.0.1:19003", "another user's"},
		{"tcp", "10.0.0.1:19004", "six (pid 9)"},
		{"udp", "0.0.0.0:49555", "six (pid 9)"},
	} {
		p, err := holder(proc(), tc.network, netip.MustParseAddrPort(tc.at))
		got := p.String()
		if err != nil {
			got = err.Error()
		}
		if got != tc.want && (err == nil || !strings.Contains(got, tc.want)) {
			t.Errorf("%s %s: %q, want %q", tc.network, tc.at, got, tc.want)
		}
	}
}

func TestHolderWithoutProc(t *testing.T) {
	_, err := holder(fstest.MapFS{}, "tcp", netip.MustParseAddrPort("127.0.0.1:19000"))
	if err == nil || !strings.Contains(err.Error(), "lsof -nP -iTCP:19000") {
		t.Errorf("%v, want what to run instead", err)
	}
	broken := proc()
	broken["net/tcp"] = text(heading + "not a socket\n")
	if _, err := holder(broken, "tcp", netip.MustParseAddrPort("127.0.0.1:19000")); err == nil || !strings.Contains(err.Error(), "/proc/net/tcp") {
		t.Errorf("%v, want the table's name", err)
	}
}

func TestHolderIsThisProcess(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("/proc is Linux's")
	}
	for _, address := range []string{"127.0.0.1:0", "[::]:0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		p, err := holder(os.DirFS("/proc"), "tcp", netip.MustParseAddrPort(l.Addr().String()))
		if err != nil || p.PID != os.Getpid() {
			t.Errorf("%s: %v, %v, want pid %d", l.Addr(), p, err, os.Getpid())
		}
	}
}

func FuzzParseSocket(f *testing.F) {
	f.Add(line("0100007F:4A38", "0A", "11"))
	f.Add(line("00000000000000000000000000000000:4A3C", "07", "15"))
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseSocket(text)
		if err == nil && (!s.local.Addr().IsValid() || s.inode == "") {
			t.Errorf("%q: %+v without an error", text, s)
		}
	})
}
