package sdk

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
)

// ResidentBytes returns the memory that this process holds in RAM, for Stats; 0 when the system does not tell.
func ResidentBytes() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var total, resident int64
	if _, err := fmt.Sscan(string(text), &total, &resident); err != nil {
		return 0
	}
	return resident * int64(os.Getpagesize())
}

// SystemMemory returns the bytes of RAM that this process may have at most, and how many of them a new program can have, for
// Device: the machine's, or what its control groups leave where that is less. Zeros when the system does not tell.
func SystemMemory() (total, free int64) { return systemMemory(os.DirFS("/")) }

// systemMemory reads /proc and /sys under root.
func systemMemory(root fs.FS) (total, free int64) {
	text, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, 0
	}
	total, free = meminfo(string(text), "MemTotal"), meminfo(string(text), "MemAvailable")
	for _, g := range memoryGroups(root) {
		if limit, used, ok := g.usage(root); ok {
			total, free = min(total, limit), min(free, max(0, limit-used))
		}
	}
	return total, free
}

// meminfo reads one line of /proc/meminfo: "MemTotal:  65855932 kB".
func meminfo(text, key string) int64 {
	_, rest, _ := strings.Cut("\n"+text, "\n"+key+":")
	var kilobytes int64
	if _, err := fmt.Sscan(rest, &kilobytes); err != nil {
		return 0
	}
	return kilobytes << 10
}

// memoryGroup is a control group that may limit the memory of this process, and the names of its files.
type memoryGroup struct {
	dir                 string
	limit, used, unused string
}

// memoryGroups lists the groups that this process belongs to, up to the outermost that is seen here: the limit of each holds.
// A group beyond a container's own may be named but not seen; then its folder is missing.
func memoryGroups(root fs.FS) []memoryGroup {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return nil
	}
	var groups []memoryGroup
	for line := range strings.Lines(string(text)) { // "0::/a/b" of version 2, "4:memory:/a/b" of version 1
		id, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, found := strings.Cut(rest, ":")
		g := memoryGroup{dir: "sys/fs/cgroup", limit: "memory.max", used: "memory.current", unused: "inactive_file"}
		switch {
		case !found:
			continue
		case id == "0" && controllers == "":
		case strings.Contains(","+controllers+",", ",memory,"):
			g = memoryGroup{
				dir: "sys/fs/cgroup/memory", limit: "memory.limit_in_bytes", used: "memory.usage_in_bytes", unused: "total_inactive_file",
			}
		default:
			continue
		}
		mount := g.dir
		for at := path.Join("/", group); ; at = path.Dir(at) {
			g.dir = path.Join(mount, at)
			groups = append(groups, g)
			if at == "/" {
				break
			}
		}
	}
	return groups
}

// usage reads the group's limit and what of it can't be had back, in bytes; false without a limit. Files that were read once
// count as used until somebody needs the memory, so they are taken off.
func (g *memoryGroup) usage(root fs.FS) (limit, used int64, ok bool) {
	if limit, ok = groupNumber(root, g.dir, g.limit); !ok {
		return 0, 0, false
	}
	used, _ = groupNumber(root, g.dir, g.used)
	stat, err := fs.ReadFile(root, path.Join(g.dir, "memory.stat"))
	if err != nil {
		return limit, used, true
	}
	for line := range strings.Lines(string(stat)) {
		if key, value, _ := strings.Cut(strings.TrimSpace(line), " "); key == g.unused {
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				used = max(0, used-n)
			}
		}
	}
	return limit, used, true
}

// groupNumber reads a file that holds one number; false if there is none, or "max" for no limit.
func groupNumber(root fs.FS, dir, name string) (int64, bool) {
	text, err := fs.ReadFile(root, path.Join(dir, name))
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return int64(min(n, math.MaxInt64)), err == nil
}
