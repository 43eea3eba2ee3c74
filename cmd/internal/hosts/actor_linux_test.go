package hosts

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"
)

const actorFlag = "MLXCEL_TEST_ACTOR" // set: this program plays a role in a test

func TestMain(m *testing.M) {
	if os.Getenv(actorFlag) == "" {
		os.Exit(m.Run())
	}
	if err := act(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// act does one thing after the other, then waits for a signal; not for ever, as nobody sends one to an orphan if the test is killed.
func act(things []string) error {
	log := hclog.New(&hclog.LoggerOptions{Name: "actor", Output: os.Stderr, JSONFormat: true})
	var keep []any
	for _, thing := range things {
		verb, object, _ := strings.Cut(thing, "=")
		held, err := do(log, verb, object)
		if err != nil {
			return fmt.Errorf("%s: %w", thing, err)
		}
		keep = append(keep, held)
	}
	defer fmt.Fprint(os.Stderr, keep...) // so that nothing of it is collected
	time.Sleep(2 * Patience)
	return nil
}

func do(log hclog.Logger, verb, object string) (held any, err error) {
	switch verb {
	case "log":
		log.Info(object, "stage", 1)
	case "exit":
		os.Exit(len(object))
	case "tcp":
		return net.Listen("tcp", object)
	case "udp":
		return net.ListenPacket("udp", object)
	case "http":
		l, err := net.Listen("tcp", object)
		if err != nil {
			return nil, err
		}
		fmt.Printf("listening on http://%s\n", l.Addr())
		return nil, http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }))
	case "memfd":
		return unix.MemfdCreate(object, unix.MFD_CLOEXEC)
	case "mapped":
		return nil, mapMemory(object)
	case "file":
		return nil, os.WriteFile(object, nil, 0o600)
	case "temp":
		return nil, os.WriteFile(filepath.Join(os.TempDir(), object), nil, 0o600)
	case "child", "orphan":
		child := exec.Command(object, "log=born")
		child.Env = append(os.Environ(), "TMPDIR="+filepath.Join(os.TempDir(), "below"))
		child.Stderr = os.Stderr
		child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if verb == "orphan" {
			child.Dir, child.Stderr = "/", nil
		}
		return child, child.Start()
	default:
		return nil, fmt.Errorf("what is %q", verb)
	}
	return nil, nil
}

// mapMemory keeps memory without a name mapped, but not open.
func mapMemory(name string) error {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 4096); err != nil {
		return err
	}
	_, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	return err
}

// program is this test's own binary, a copy under a name if there is one.
func program(t testing.TB, as string) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if as == "" {
		return path
	}
	binary, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if path = filepath.Join(t.TempDir(), as); os.MkdirAll(filepath.Dir(path), 0o700) != nil || os.WriteFile(path, binary, 0o700) != nil {
		t.Fatalf("copy the program to %s", path)
	}
	return path
}

func actor(t testing.TB, h *Host, things ...string) *Process {
	t.Helper()
	return h.Start(t, Command{Path: program(t, ""), Args: things, Env: []string{actorFlag + "=1"}})
}
