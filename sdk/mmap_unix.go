//go:build unix

package sdk

import (
	"os"

	"golang.org/x/sys/unix"
)

// growFile gives f at least size bytes.
func growFile(f *os.File, size int) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() >= int64(size) {
		return nil
	}
	return f.Truncate(int64(size))
}

// mapShared maps the first size bytes of f; a region without bytes still gets a page.
func mapShared(f *os.File, size int) ([]byte, error) {
	return unix.Mmap(int(f.Fd()), 0, max(size, 1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func unmapShared(mem []byte) error { return unix.Munmap(mem) }
