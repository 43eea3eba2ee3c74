package sdk

import (
	"testing"
	"testing/fstest"
)

// The machine's memory, and what control groups of either version leave of it.
func TestSystemMemory(t *testing.T) {
	const meminfo = "MemTotal:        8000 kB\nMemFree:          100 kB\nMemAvailable:    6000 kB\n"
	const kB = 1024
	v2, v1 := "sys/fs/cgroup/", "sys/fs/cgroup/memory/"
	cases := map[string]struct {
		files       map[string]string
		total, free int64
	}{
		"no groups":    {nil, 8000 * kB, 6000 * kB},
		"no limit":     {map[string]string{"proc/self/cgroup": "0::/\n", v2 + "memory.max": "max\n", v2 + "memory.current": "5\n"}, 8000 * kB, 6000 * kB},
		"a container":  {map[string]string{"proc/self/cgroup": "0::/\n", v2 + "memory.max": "4096000\n", v2 + "memory.current": "1024000\n"}, 4000 * kB, 3000 * kB},
		"a wide limit": {map[string]string{"proc/self/cgroup": "0::/\n", v2 + "memory.max": "99999999999\n", v2 + "memory.current": "0\n"}, 8000 * kB, 6000 * kB},
		"used up":      {map[string]string{"proc/self/cgroup": "0::/\n", v2 + "memory.max": "4096000\n", v2 + "memory.current": "4100000\n"}, 4000 * kB, 0},
		"cached files": {map[string]string{
			"proc/self/cgroup": "0::/\n", v2 + "memory.max": "4096000\n", v2 + "memory.current": "2048000\n",
			v2 + "memory.stat": "anon 1\ninactive_file 1024000\nactive_file 7\n",
		}, 4000 * kB, 3000 * kB},
		"a service, whose slice is limited": {map[string]string{
			"proc/self/cgroup": "0::/a.slice/b.service\n", v2 + "a.slice/memory.max": "4096000\n", v2 + "a.slice/memory.current": "3072000\n",
			v2 + "a.slice/b.service/memory.max": "5120000\n", v2 + "a.slice/b.service/memory.current": "1024\n",
		}, 4000 * kB, 1000 * kB},
		"a group out of sight": {map[string]string{
			"proc/self/cgroup": "0::/../../x\n", v2 + "memory.max": "4096000\n", v2 + "memory.current": "0\n",
		}, 4000 * kB, 4000 * kB},
		"version 1": {map[string]string{
			"proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/c\n0::/c\n", v1 + "c/memory.limit_in_bytes": "2048000\n",
			v1 + "c/memory.usage_in_bytes": "1024000\n", v1 + "c/memory.stat": "inactive_file 3\ntotal_inactive_file 1024\n",
			v1 + "memory.limit_in_bytes": "9223372036854771712\n", v1 + "memory.usage_in_bytes": "9\n",
		}, 2000 * kB, 1001 * kB},
		"nonsense": {map[string]string{"proc/self/cgroup": "\n::\nmemory\n0::/\n", v2 + "memory.max": "-1\n"}, 8000 * kB, 6000 * kB},
	}
	for name, c := range cases {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}}
		for file, text := range c.files {
			root[file] = &fstest.MapFile{Data: []byte(text)}
		}
		if total, free := systemMemory(root); total != c.total || free != c.free {
			t.Errorf("%s: %d bytes, %d free; want %d, %d", name, total, free, c.total, c.free)
		}
	}
	if total, free := systemMemory(fstest.MapFS{}); total != 0 || free != 0 {
		t.Errorf("without /proc: %d bytes, %d free", total, free)
	}
}
