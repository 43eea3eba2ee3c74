//go:build linux || darwin

package discovery

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// shared lets two coordinators on one host listen; broadcasts reach both.
func shared(_, _ string, c syscall.RawConn) (err error) {
	control := c.Control(func(fd uintptr) {
		for _, option := range []int{unix.SO_REUSEADDR, unix.SO_REUSEPORT} {
			if err == nil {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, 1)
			}
		}
	})
	if control != nil {
		return control
	}
	return err
}
