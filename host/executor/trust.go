package executor

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// checkTrust refuses a binary that somebody else could have put there or could change: it, and the folder
// that holds it (and the link to it, where it is reached by one), must belong to this user or to root, and must not be writable by everybody. A group's
// write permission is let pass: many systems give each user a group of their own.
func checkTrust(path string, uid int) error {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return fmt.Errorf("resolve %s: %w", path, err)
	}
	// Whoever may write the folder of a link may point it elsewhere, so both folders count.
	for _, p := range []string{filepath.Dir(path), filepath.Dir(real), real} {
		info, err := os.Stat(p)
		if err != nil {
			return fmt.Errorf("check %s: %w", p, err)
		}
		if err := trusted(p, info, uid); err != nil {
			return err
		}
	}
	return nil
}

func trusted(path string, info fs.FileInfo, uid int) error {
	if info.Mode().Perm()&0o002 != 0 {
		return &UntrustedError{Path: path, Why: fmt.Sprintf("everybody may write it (mode %#o)", info.Mode().Perm()), Fix: "chmod o-w " + path}
	}
	if owner := ownerOf(info); owner != uid && owner != 0 {
		return &UntrustedError{Path: path, Why: fmt.Sprintf("it belongs to user %d, neither to this user (%d) nor to root", owner, uid), Fix: fmt.Sprintf("chown %d %s", uid, path)}
	}
	return nil
}

// ownerOf returns the numeric owner of a file.
func ownerOf(info fs.FileInfo) int {
	return int(info.Sys().(*syscall.Stat_t).Uid)
}
