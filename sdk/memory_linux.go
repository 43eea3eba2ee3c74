package sdk

import (
	"fmt"
	"os"
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

// SystemMemory returns the bytes of RAM of this machine, and how many of them a new program can have, for Device;
// zeros when the system does not tell.
func SystemMemory() (total, free int64) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0
	}
	return meminfo(string(text), "MemTotal"), meminfo(string(text), "MemAvailable")
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
