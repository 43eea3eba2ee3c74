package executor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// runFolder is a host process's private folder for what its executors need while they run: their Unix
// sockets and temporary files. It is <base>/<pid>-<random>, mode 0700. While the host lives it holds an
// exclusive flock on the folder itself, so that a later start can tell a live folder from one that a killed
// host left behind, and remove the latter.
type runFolder struct {
	path string
	dir  *os.File // holds the lock
}

// deadPrefix marks a folder that a sweep has claimed. A folder is renamed before it is emptied, so that no
// host can take up a folder that is being removed.
const deadPrefix = "dead-"

// DefaultRunBase returns where run folders go: mlxcel-<uid> in the temporary folder. It is short on purpose:
// a Unix socket's path has room for about 100 bytes.
func DefaultRunBase(tempDir string, uid int) string {
	return filepath.Join(tempDir, "mlxcel-"+strconv.Itoa(uid))
}

// openRunFolder creates the run folder of this process under base and sweeps what dead hosts left there.
// base is created with mode 0700; a base that another user owns, or that others may write, is refused.
func openRunFolder(base string, uid int) (*runFolder, error) {
	if err := os.MkdirAll(base, 0o700); err != nil {
		return nil, fmt.Errorf("create the run folder: %w", err)
	}
	if err := checkPrivate(base, uid); err != nil {
		return nil, err
	}
	if err := sweep(base); err != nil {
		return nil, err
	}
	const attempts = 10 // each lost only to a sweep by another host in the same instant
	for range attempts {
		path, err := os.MkdirTemp(base, strconv.Itoa(os.Getpid())+"-")
		if err != nil {
			return nil, fmt.Errorf("create the run folder: %w", err)
		}
		dir, err := lockFolder(path)
		if err != nil {
			return nil, fmt.Errorf("lock the run folder %s: %w", path, err)
		}
		if dir != nil {
			return &runFolder{path: path, dir: dir}, nil
		}
	}
	return nil, fmt.Errorf("no run folder under %s after %d attempts: another process keeps removing it", base, attempts)
}

// close removes the folder and gives up its lock.
func (r *runFolder) close() error {
	return errors.Join(os.RemoveAll(r.path), r.dir.Close())
}

// subfolder creates a fresh folder for one executor.
func (r *runFolder) subfolder(n int) (string, error) {
	path := filepath.Join(r.path, strconv.Itoa(n))
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", fmt.Errorf("create the executor's run folder: %w", err)
	}
	// The socket's own name is "plugin" and at most ten digits.
	if longest := len(path) + len("/plugin4294967295"); longest > maxSocketPath {
		return "", fmt.Errorf("the run folder's path %s is too long: a socket in it would have %d bytes, the system allows %d: set TMPDIR to a shorter folder",
			path, longest, maxSocketPath)
	}
	return path, nil
}

// sweep removes the run folders whose host is gone.
func sweep(base string) error {
	entries, err := os.ReadDir(base)
	if err != nil {
		return fmt.Errorf("sweep old run folders: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := sweepOne(base, e.Name()); err != nil {
			return fmt.Errorf("sweep old run folders: %w", err)
		}
	}
	return nil
}

func sweepOne(base, name string) error {
	path := filepath.Join(base, name)
	dir, err := lockFolder(path)
	if err != nil || dir == nil {
		return err
	}
	defer dir.Close()
	dead := path
	if !strings.HasPrefix(name, deadPrefix) {
		dead = filepath.Join(base, deadPrefix+name)
		if err := os.Rename(path, dead); err != nil {
			return err
		}
	}
	return os.RemoveAll(dead)
}

// lockFolder opens path and takes its lock. It returns nil without an error when somebody else holds the
// lock or the folder is no longer there.
func lockFolder(path string) (*os.File, error) {
	dir, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	locked, err := tryLock(dir)
	if err != nil || !locked || !samePlace(dir, path) {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

func tryLock(f *os.File) (bool, error) {
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
		case nil:
			return true, nil
		case unix.EWOULDBLOCK:
			return false, nil
		case unix.EINTR:
		default:
			return false, err
		}
	}
}

// samePlace tells whether path still names the folder that dir has open: it may have been swept between
// the open and the lock.
func samePlace(dir *os.File, path string) bool {
	opened, err := dir.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(opened, there)
}

func checkPrivate(path string, uid int) error {
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("check the run folder: %w", err)
	}
	if !info.IsDir() {
		return &UntrustedError{Path: path, Why: "the run folder's place is taken by something that is no folder", Fix: "rm " + path}
	}
	if owner := ownerOf(info); owner != uid {
		return &UntrustedError{Path: path, Why: fmt.Sprintf("the run folder belongs to user %d, this is user %d", owner, uid), Fix: "set TMPDIR to a folder of your own"}
	}
	if info.Mode().Perm()&0o077 != 0 {
		return &UntrustedError{Path: path, Why: fmt.Sprintf("the run folder is open to others (mode %#o)", info.Mode().Perm()), Fix: "chmod 700 " + path}
	}
	return nil
}
