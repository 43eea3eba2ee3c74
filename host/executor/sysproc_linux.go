package executor

import "syscall"

// maxSocketPath is the room for a Unix socket's path, the closing zero byte taken off.
const maxSocketPath = 107

// processAttributes puts an executor into a process group of its own, so that Ctrl-C reaches the host alone,
// which then stops its executors in order; and has the kernel kill it when the thread that started it ends,
// which is when the host does. The lifeline would end it as well, but not before it serves.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
