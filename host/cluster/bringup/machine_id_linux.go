package bringup

import (
	"os"
	"strings"
)

// MachineID names the running system, whose memory all its processes share, those of containers and network namespaces too.
// It is empty where the system does not tell.
func MachineID() string {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}
