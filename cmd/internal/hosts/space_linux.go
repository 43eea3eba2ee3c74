package hosts

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// space is an operating-system thread, in namespaces of its own if it is apart. What a job does there, it does inside: the
// sockets that it makes and the processes that it starts stay in the namespaces. The thread lives as long as the space, so
// that processes can be bound to its death.
type space struct {
	jobs  chan func()
	ended chan struct{}
	net   *os.File // the network namespace; nil unless the space is apart
}

func openSpace(apart bool) (*space, error) {
	s := &space{jobs: make(chan func()), ended: make(chan struct{})}
	opened := make(chan error)
	go onOwnThread(func() {
		defer close(s.ended)
		var err error
		if apart {
			err = s.leave()
		}
		opened <- err
		if err != nil {
			return
		}
		for job := range s.jobs {
			job()
		}
	})
	if err := <-opened; err != nil {
		<-s.ended
		return nil, err
	}
	return s, nil
}

// leave moves the calling thread into new namespaces.
func (s *space) leave() error {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make namespaces: %w", err)
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", sharedMemory, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return fmt.Errorf("mount %s: %w", sharedMemory, err)
	}
	var err error
	s.net, err = os.Open("/proc/thread-self/ns/net")
	return err
}

// do runs a short job in the space and waits for it.
func (s *space) do(job func() error) error {
	done := make(chan error, 1)
	s.jobs <- func() { done <- job() }
	return <-done
}

// enter runs a job that may block in the space's network, on a thread of its own, and waits for it.
func (s *space) enter(job func() error) error {
	if s.net == nil {
		return job()
	}
	done := make(chan error, 1)
	go onOwnThread(func() {
		if err := unix.Setns(int(s.net.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter a network namespace: %w", err)
			return
		}
		done <- job()
	})
	return <-done
}

// ip runs commands of the ip tool in the space. The commands may name files as /proc/self/fd/3 and so on.
func (s *space) ip(commands string, files ...*os.File) error {
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader(commands)
	cmd.ExtraFiles = files
	_, err := s.output(cmd)
	return err
}

// ipOutput runs one command of the ip tool in the space and returns what it prints.
func (s *space) ipOutput(args ...string) (string, error) {
	return s.output(exec.Command("ip", args...))
}

func (s *space) output(cmd *exec.Cmd) (out string, err error) {
	err = s.do(func() error {
		raw, err := cmd.CombinedOutput()
		if out = string(raw); err != nil {
			err = fmt.Errorf("%s (of iproute2): %w: %s", cmd, err, out)
		}
		return err
	})
	return out, err
}

func (s *space) close() {
	close(s.jobs)
	<-s.ended
	if s.net != nil {
		s.net.Close()
	}
}

// onOwnThread runs a job on a thread that ends with it, as what the job did to the thread cannot be undone.
func onOwnThread(job func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		job() // a goroutine that ends locked takes its thread along
		return
	}
	// The main thread cannot end. While it is held here, the next goroutine gets another one.
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		job()
	}()
	<-done
	runtime.UnlockOSThread()
}
