package executor

import "syscall"

// maxSocketPath is the room for a Unix socket's path, the closing zero byte taken off.
const maxSocketPath = 103

// processAttributes puts an executor into a process group of its own, so that Ctrl-C reaches the host alone,
// which then stops its executors in order. Darwin has no parent-death signal: the lifeline ends an executor
// whose host is gone, and one that is stopped is continued and hung up on, being an orphaned process group.
// Only a program that hangs before it serves, and so is no executor yet, can outlive a killed host.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
