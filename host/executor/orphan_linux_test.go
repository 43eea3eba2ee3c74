package executor

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestExecutorOutlivesTheStartingThread ends the thread that asked for the start: the kernel's parent-death
// signal is bound to a thread, which must not be that one.
func TestExecutorOutlivesTheStartingThread(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "good"))
	c := openCatalog(t, cfg)
	var p *Process
	var err error
	thread := onDoomedThread(func() {
		p, err = c.Start(t.Context(), Spec{Plugin: filepath.Join(cfg.PluginDirs[0], "good")})
	})
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the thread to end", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", thread))
		return os.IsNotExist(err)
	})
	if _, err := p.Health(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestKilledHostDuringScan kills a host while a program hangs before it watches its lifeline: only the kernel's
// parent-death signal ends that one.
func TestKilledHostDuringScan(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "hangs-at-start"))
	host, _ := startHost(t, cfg)
	var files []string
	waitFor(t, "the program to hang", func() bool {
		files, _ = filepath.Glob(filepath.Join(cfg.RunBase, "*", "*", "pid"))
		return len(files) == 1 && readText(files[0]) != ""
	})
	pid := readPID(t, files[0])
	killHost(t, host)
	waitGone(t, pid)
}

func readText(file string) string {
	text, _ := os.ReadFile(file)
	return string(text)
}

// onDoomedThread runs f on a thread that ends right after it, and returns the thread's number.
func onDoomedThread(f func()) int {
	number := make(chan int)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == os.Getpid() {
			number <- onDoomedThread(f) // not this one: the main thread never ends
			return
		}
		f()
		number <- unix.Gettid()
	}()
	return <-number
}
