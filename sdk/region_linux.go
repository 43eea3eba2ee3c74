package sdk

import (
	"os"

	"golang.org/x/sys/unix"
)

// openAnonymous opens memory that never had a name.
func openAnonymous() (*os.File, error) {
	fd, err := unix.MemfdCreate("mlxcel-region", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return os.NewFile(uintptr(fd), "mlxcel-region"), nil
}
