//go:build unix && !linux

package sdk

import "os"

// openAnonymous opens a temporary file and takes its name away at once, so that nothing is left behind however
// the host ends.
func openAnonymous() (*os.File, error) {
	f, err := os.CreateTemp("", "mlxcel-region-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
