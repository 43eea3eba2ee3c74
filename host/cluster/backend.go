package cluster

import (
	"fmt"
	"strings"
)

// Backend is what carries frames between stages.
type Backend string

// The values of transport_backend.
const (
	BackendTCP         Backend = "tcp"
	BackendThunderbolt Backend = "thunderbolt"
	BackendRDMA        Backend = "rdma"
)

var backends = []Backend{BackendTCP, BackendThunderbolt, BackendRDMA}

// ParseBackend reads a value of transport_backend. Empty is tcp.
func ParseBackend(text string) (Backend, error) {
	if text == "" {
		return BackendTCP, nil
	}
	names := make([]string, len(backends))
	for i, b := range backends {
		if text == string(b) {
			return b, nil
		}
		names[i] = string(b)
	}
	return "", fmt.Errorf("%q is no transport: give %s", text, strings.Join(names, ", "))
}

// Fallback returns the line that is logged once where frames travel over TCP although another backend was asked for, on an
// operating system by its GOOS name. Empty where nothing falls back.
func (b Backend) Fallback(goos string) string {
	if b == BackendTCP || b == "" {
		return ""
	}
	driver := "unsupported"
	if goos == "darwin" || goos == "linux" && b == BackendRDMA {
		driver = fmt.Sprintf("not_built: this version has no %s transport", b)
	}
	return fmt.Sprintf("%s_transport: falling back to TCP (reason=os=%s, driver=%s)", b, goos, driver)
}
