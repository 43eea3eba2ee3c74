package doctor

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"strconv"
	"strings"
)

// errHidden is a port whose process belongs to another user.
var errHidden = errors.New("it is another user's: run this as root to see it")

// holder finds the process that has a port, in a Linux /proc.
func holder(proc fs.FS, network string, at netip.AddrPort) (Process, error) {
	inodes := map[string]bool{}
	for _, table := range []string{network, network + "6"} {
		err := sockets(proc, path.Join("net", table), at, inodes)
		if errors.Is(err, fs.ErrNotExist) && table == network {
			return Process{}, fmt.Errorf("run `lsof -nP -i%s:%d` to see it", strings.ToUpper(network), at.Port())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // without IPv6 there is no second table
			return Process{}, err
		}
	}
	if len(inodes) == 0 {
		return Process{}, errors.New("it has let go of it since")
	}
	return owner(proc, inodes)
}

// sockets adds the inodes of the sockets of a table that have a port.
func sockets(proc fs.FS, table string, at netip.AddrPort, inodes map[string]bool) error {
	f, err := proc.Open(table)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Scan() // the heading
	for lines.Scan() {
		s, err := parseSocket(lines.Text())
		if err != nil {
			return fmt.Errorf("/proc/%s: %w", table, err)
		}
		if s.listens && s.local.Port() == at.Port() && overlap(s.local.Addr(), at.Addr()) {
			inodes[s.inode] = true
		}
	}
	return lines.Err()
}

// overlap tells whether two sockets with these addresses can't both have one port.
func overlap(a, b netip.Addr) bool {
	a, b = a.Unmap(), b.Unmap()
	return a == b || a.IsUnspecified() || b.IsUnspecified()
}

// socket is one line of /proc/net/tcp or udp.
type socket struct {
	local   netip.AddrPort
	listens bool // or, of UDP, is not connected
	inode   string
}

// parseSocket reads "sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode ...", see proc_pid_net(5).
func parseSocket(line string) (socket, error) {
	const listening, unconnected = "0A", "07"
	fields := strings.Fields(line)
	if len(fields) < 10 {
		return socket{}, fmt.Errorf("line %q has %d fields, want 10", line, len(fields))
	}
	host, port, _ := strings.Cut(fields[1], ":")
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return socket{}, fmt.Errorf("port of %q: %w", fields[1], err)
	}
	ip, err := parseIP(host)
	if err != nil {
		return socket{}, err
	}
	state := fields[3]
	return socket{netip.AddrPortFrom(ip, uint16(n)), state == listening || state == unconnected, fields[9]}, nil
}

// parseIP reads an address as the kernel prints it: words of 32 bits, each in the machine's byte order.
func parseIP(text string) (netip.Addr, error) {
	if len(text) != 8 && len(text) != 32 {
		return netip.Addr{}, fmt.Errorf("address %q has %d digits, want 8 or 32", text, len(text))
	}
	var raw []byte
	for i := 0; i < len(text); i += 8 {
		word, err := strconv.ParseUint(text[i:i+8], 16, 32)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("address %q: %w", text, err)
		}
		raw = binary.NativeEndian.AppendUint32(raw, uint32(word))
	}
	ip, _ := netip.AddrFromSlice(raw) // 4 or 16 bytes
	return ip, nil
}

// owner finds the process with one of the sockets among its open files.
func owner(proc fs.FS, inodes map[string]bool) (Process, error) {
	processes, err := fs.ReadDir(proc, ".")
	if err != nil {
		return Process{}, err
	}
	for _, p := range processes {
		pid, err := strconv.Atoi(p.Name())
		if err != nil || !hasSocket(proc, path.Join(p.Name(), "fd"), inodes) {
			continue
		}
		name, err := fs.ReadFile(proc, path.Join(p.Name(), "comm"))
		if err != nil {
			continue // it has just ended
		}
		return Process{PID: pid, Name: strings.TrimSpace(string(name))}, nil
	}
	return Process{}, errHidden
}

// hasSocket looks through the open files of a process; those of other users' can't be read, and are passed over.
func hasSocket(proc fs.FS, folder string, inodes map[string]bool) bool {
	files, err := fs.ReadDir(proc, folder)
	if err != nil {
		return false
	}
	for _, f := range files {
		target, err := fs.ReadLink(proc, path.Join(folder, f.Name()))
		if err != nil {
			continue
		}
		if inode, ok := strings.CutPrefix(target, "socket:["); ok && inodes[strings.TrimSuffix(inode, "]")] {
			return true
		}
	}
	return false
}
