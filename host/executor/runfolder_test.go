package executor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRunFolderSweepsTheDead(t *testing.T) {
	base := filepath.Join(t.TempDir(), "run")
	uid := os.Getuid()
	living := newRunFolder(t, base)
	// A host that was killed: its folder stays, its lock does not.
	dead := newRunFolder(t, base)
	writeFile(t, filepath.Join(dead.path, "socket"), "", 0o600)
	if err := dead.dir.Close(); err != nil {
		t.Fatal(err)
	}
	// A sweep that was killed half-way.
	half := filepath.Join(base, deadPrefix+"1-2")
	if err := os.Mkdir(half, 0o700); err != nil {
		t.Fatal(err)
	}
	next, err := openRunFolder(base, uid)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{filepath.Base(living.path): true, filepath.Base(next.path): true}
	for _, name := range namesIn(t, base) {
		if !want[name] {
			t.Errorf("%s was not swept", name)
		}
		delete(want, name)
	}
	for name := range want {
		t.Errorf("%s of a living host was swept", name)
	}
	if err := errors.Join(living.close(), next.close()); err != nil {
		t.Fatal(err)
	}
	if left := namesIn(t, base); len(left) != 0 {
		t.Errorf("%q left after Close", left)
	}
}

func TestRunFoldersOpenedTogether(t *testing.T) {
	base := filepath.Join(t.TempDir(), "run")
	const hosts = 16
	opened := make(chan error, hosts)
	for range hosts {
		go func() {
			run, err := openRunFolder(base, os.Getuid())
			if err == nil {
				_, err = run.subfolder(1)
				err = errors.Join(err, run.close())
			}
			opened <- err
		}()
	}
	for range hosts {
		if err := <-opened; err != nil {
			t.Error(err)
		}
	}
}

func TestRunFolderRefusesAnOpenBase(t *testing.T) {
	base := t.TempDir()
	if err := os.Chmod(base, 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := openRunFolder(base, os.Getuid())
	checkText(t, err, "chmod 700 "+base)
	if err := os.Chmod(base, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err = openRunFolder(base, os.Getuid()+1)
	checkText(t, err, "belongs to user")
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(base, link); err != nil {
		t.Fatal(err)
	}
	_, err = openRunFolder(link, os.Getuid())
	checkText(t, err, "is no folder")
}

func TestRunFolderPathLength(t *testing.T) {
	base := filepath.Join(t.TempDir(), strings.Repeat("x", maxSocketPath))
	run := newRunFolder(t, base)
	_, err := run.subfolder(1)
	checkText(t, err, "set TMPDIR to a shorter folder")
	if err := run.close(); err != nil {
		t.Fatal(err)
	}
}

func newRunFolder(t *testing.T, base string) *runFolder {
	t.Helper()
	run, err := openRunFolder(base, os.Getuid())
	if err != nil {
		t.Fatal(err)
	}
	return run
}

func namesIn(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
