//go:build unix && !linux

package sdk

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// ResidentBytes returns the most memory that this process has held in RAM, for Stats: without cgo these systems
// tell no more. 0 when they don't even tell that.
func ResidentBytes() int64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return usage.Maxrss
}

// SystemMemory returns the bytes of RAM of this machine, and how many of them a new program can have, for Device;
// zeros when the system does not tell.
func SystemMemory() (total, free int64) {
	size, err := unix.SysctlUint64("hw.memsize")
	if err != nil {
		return 0, 0
	}
	pages, err := unix.SysctlUint32("vm.page_free_count")
	if err != nil {
		return int64(size), 0
	}
	return int64(size), int64(pages) * int64(unix.Getpagesize())
}
