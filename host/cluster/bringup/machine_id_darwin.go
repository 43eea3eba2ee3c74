package bringup

import "golang.org/x/sys/unix"

// MachineID names the running system, whose memory all its processes share. It is empty where the system does not tell.
func MachineID() string {
	id, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return ""
	}
	return id
}
