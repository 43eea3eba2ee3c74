package hosts

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Kind is a kind of what a process can leave behind.
type Kind string

// The kinds.
const (
	KindProcess Kind = "process"       // that runs or is stopped; a dead one that nobody waited for holds nothing
	KindPort    Kind = "port"          // a TCP port that listens, or a UDP port
	KindMemory  Kind = "shared memory" // a file in /dev/shm, or one without a name that a process has open or mapped
	KindFile    Kind = "file"          // anything in the TMPDIR
)

// Thing is one thing that the processes of a network hold.
type Thing struct {
	Kind Kind
	Host string // empty where it cannot be told, on loopback
	What string
}

func (t Thing) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s", t.Host, t.Kind, t.What))
}

// Holdings is what the processes of a network hold at one moment, sorted. The zero value is nothing.
type Holdings []Thing

// Beyond returns what is in h and not in before.
func (h Holdings) Beyond(before Holdings) Holdings {
	return slices.DeleteFunc(slices.Clone(h), func(t Thing) bool { return slices.Contains(before, t) })
}

func (h Holdings) String() string {
	lines := make([]string, len(h))
	for i, t := range h {
		lines[i] = t.String()
	}
	return strings.Join(lines, "\n")
}

// Snapshot tells what the network's processes hold now.
func (n *Network) Snapshot(t testing.TB) Holdings {
	t.Helper()
	h, err := n.holdings()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// CheckNothingLeft fails the test if the network's processes go on holding more than they did before, of the given kinds
// or of all. What is being given up has some seconds for that. The run folder of a killed host is no leftover until the
// next start on that host, which sweeps it.
func (n *Network) CheckNothingLeft(t testing.TB, before Holdings, kinds ...Kind) {
	t.Helper()
	if err := retry(func() error { return n.left(before, kinds) }); err != nil {
		t.Error(err)
	}
}

func (n *Network) left(before Holdings, kinds []Kind) error {
	now, err := n.holdings()
	if err != nil {
		return err
	}
	left := slices.DeleteFunc(now.Beyond(before), func(t Thing) bool { return len(kinds) > 0 && !slices.Contains(kinds, t.Kind) })
	if len(left) > 0 {
		return fmt.Errorf("left behind:\n%s", left)
	}
	return nil
}

func (n *Network) holdings() (Holdings, error) {
	found, err := n.find()
	if err != nil {
		return nil, err
	}
	var all Holdings
	for _, p := range found {
		all = append(all, p.holdings()...)
	}
	ports, err := n.ports(found)
	if err != nil {
		return nil, err
	}
	all = append(all, ports...)
	for _, h := range n.Hosts {
		files, err := h.files()
		if err != nil {
			return nil, err
		}
		all = append(all, files...)
	}
	slices.SortFunc(all, func(a, b Thing) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(all), nil
}

// process is one of /proc.
type process struct {
	pid, parent int
	state       string // R, S, D, T, …
	started     uint64 // clock ticks since boot
	program     string // path
	host        string // where it was found to run; empty where that cannot be told
}

// readProcess reads /proc/PID; fs.ErrNotExist or ESRCH says that it is gone.
func readProcess(pid int) (process, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, err
	}
	// "pid (name) state parent …"; the name may hold anything.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	const state, parent, started = 0, 1, 19
	if len(fields) <= started {
		return process{}, fmt.Errorf("/proc/%d/stat is %q", pid, raw)
	}
	p := process{pid: pid, state: fields[state]}
	var wrong error
	p.parent, err = strconv.Atoi(fields[parent])
	p.started, wrong = strconv.ParseUint(fields[started], 10, 64)
	if err := errors.Join(err, wrong); err != nil {
		return process{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	p.program, _ = os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	return p, nil
}

// processes returns all that live, the oldest first.
func processes() ([]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var all []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, err := readProcess(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) || p.state == "Z" || p.state == "X" {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b process) int {
		return cmp.Or(cmp.Compare(a.started, b.started), cmp.Compare(a.pid, b.pid))
	})
	return all, nil
}

// find returns the network's processes: those in a namespace of a host, and those whose environment or folder lies in
// the network's. The latter finds the executors on loopback too, as their TMPDIR lies in that of the process that started them.
func (n *Network) find() ([]process, error) {
	names := map[uint64]string{}
	for _, h := range n.Hosts {
		id, err := h.namespace()
		if err != nil {
			return nil, err
		}
		if id != 0 {
			names[id] = h.Name
		}
	}
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var found []process
	for _, p := range all {
		var stat unix.Stat_t
		if unix.Stat(fmt.Sprintf("/proc/%d/ns/net", p.pid), &stat) == nil {
			p.host = names[stat.Ino]
		}
		if p.host == "" {
			p.host = n.mentioned(p.pid)
		}
		if p.host != "" && p.pid != os.Getpid() {
			found = append(found, p)
		}
	}
	return found, nil
}

// mentioned returns the host whose folder a process's environment or working folder names.
func (n *Network) mentioned(pid int) string {
	env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	folder, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	for _, h := range n.Hosts {
		if bytes.Contains(env, []byte(h.dir+"/")) || strings.HasPrefix(folder, h.dir+"/") {
			return h.Name
		}
	}
	return ""
}

// holdings is the process itself and the memory without a name that it shares.
func (p process) holdings() Holdings {
	all := Holdings{{KindProcess, p.host, fmt.Sprintf("%d %s", p.pid, p.program)}}
	for _, name := range p.sharedMemory() {
		all = append(all, Thing{KindMemory, p.host, fmt.Sprintf("%s of process %d %s", name, p.pid, p.program)})
	}
	return all
}

func (p process) sharedMemory() []string {
	var names []string
	keep := func(path, inode string) {
		if strings.HasPrefix(path, "/memfd:") || strings.HasPrefix(path, sharedMemory+"/") && strings.HasSuffix(path, deleted) {
			names = append(names, fmt.Sprintf("%s (inode %s)", strings.TrimSuffix(path, deleted), inode))
		}
	}
	open, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.pid))
	for _, fd := range open {
		target, _ := os.Readlink(fd)
		var stat unix.Stat_t
		if unix.Stat(fd, &stat) == nil {
			keep(target, strconv.FormatUint(stat.Ino, 10))
		}
	}
	maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.pid))
	for text := range strings.Lines(string(maps)) { // "range access offset device inode path"
		fields := strings.SplitN(strings.Join(strings.Fields(text), " "), " ", 6)
		if len(fields) == 6 {
			keep(fields[5], fields[4])
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

const deleted = " (deleted)"

// files lists what lies in the host's TMPDIR, but for the folder of run folders itself, which stays; and in its /dev/shm.
func (h *Host) files() (Holdings, error) {
	var all Holdings
	runBase := filepath.Join(h.Temp(), fmt.Sprintf("mlxcel-%d", os.Getuid()))
	err := filepath.WalkDir(h.Temp(), func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed since it was listed
		}
		if err == nil && path != h.Temp() && path != runBase {
			relative, _ := filepath.Rel(h.Temp(), path)
			all = append(all, Thing{KindFile, h.Name, relative})
		}
		return err
	})
	if err != nil || h.space.net == nil { // on loopback /dev/shm is everybody's
		return all, err
	}
	err = h.space.do(func() error {
		entries, err := os.ReadDir(sharedMemory)
		for _, e := range entries {
			all = append(all, Thing{KindMemory, h.Name, filepath.Join(sharedMemory, e.Name())})
		}
		return err
	})
	return all, err
}

// ports lists the TCP ports that listen and the UDP ports: all of a namespace, or on loopback those with an address of the
// network and those that belong to its processes.
func (n *Network) ports(found []process) (Holdings, error) {
	var all Holdings
	if n.bridge == nil {
		sockets, err := readSockets()
		held := socketsOf(found)
		for _, s := range sockets {
			if n.prefix.Contains(s.local.Addr()) || held[s.inode] {
				all = append(all, Thing{KindPort, "", s.String()})
			}
		}
		return all, err
	}
	for _, h := range n.Hosts {
		err := h.space.do(func() error {
			sockets, err := readSockets()
			for _, s := range sockets {
				all = append(all, Thing{KindPort, h.Name, s.String()})
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// socket is one that others can reach.
type socket struct {
	protocol string
	local    netip.AddrPort
	inode    string
}

func (s socket) String() string { return s.protocol + " " + s.local.String() }

// readSockets reads those of the calling thread's namespace.
func readSockets() ([]socket, error) {
	var all []socket
	for _, protocol := range []string{"tcp", "tcp6", "udp", "udp6"} {
		raw, err := os.ReadFile("/proc/thread-self/net/" + protocol)
		if errors.Is(err, fs.ErrNotExist) {
			continue // no IPv6 here
		}
		if err != nil {
			return nil, err
		}
		some, err := parseSockets(protocol, string(raw))
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// parseSockets reads a table of /proc/net: a header, then "slot local remote state … inode …" a line.
func parseSockets(protocol, table string) ([]socket, error) {
	const local, state, inode, listens, unconnected = 1, 3, 9, "0A", "07"
	var all []socket
	_, table, _ = strings.Cut(table, "\n")
	for text := range strings.Lines(table) {
		fields := strings.Fields(text)
		if len(fields) <= inode {
			return nil, fmt.Errorf("a line of /proc/net/%s is %q", protocol, text)
		}
		if reachable := fields[state] == listens || strings.HasPrefix(protocol, "udp") && fields[state] == unconnected; !reachable {
			continue
		}
		address, err := parseSocketAddress(fields[local])
		if err != nil {
			return nil, fmt.Errorf("a line of /proc/net/%s is %q: %w", protocol, text, err)
		}
		all = append(all, socket{protocol, address, fields[inode]})
	}
	return all, nil
}

// parseSocketAddress reads "0100007F:4A38": the address in words of the machine's byte order, the port as a number.
func parseSocketAddress(text string) (netip.AddrPort, error) {
	address, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	number, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	for i := 0; i+4 <= len(raw); i += 4 {
		binary.BigEndian.PutUint32(raw[i:], binary.NativeEndian.Uint32(raw[i:]))
	}
	ip, ok := netip.AddrFromSlice(raw)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("address of %d bytes", len(raw))
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(number)), nil
}

// socketsOf returns the inodes of the sockets that processes have open.
func socketsOf(found []process) map[string]bool {
	held := map[string]bool{}
	for _, p := range found {
		open, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.pid))
		for _, fd := range open {
			target, _ := os.Readlink(fd)
			if inode, ok := strings.CutPrefix(target, "socket:["); ok {
				held[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	return held
}
