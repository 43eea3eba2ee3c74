package doctor

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// connMTU returns what the kernel believes that the path of a connection takes, in bytes.
func connMTU(c *net.TCPConn) (mtu int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var info *unix.TCPInfo
	var failed error
	err = raw.Control(func(fd uintptr) { info, failed = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err != nil || failed != nil {
		return 0, errors.Join(err, failed)
	}
	return int(info.Pmtu), nil
}
