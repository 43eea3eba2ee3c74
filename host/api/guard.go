package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// admit tells whether a request may come in at all: from this host, this origin, and with a key.
func (s *Server) admit(w http.ResponseWriter, r *http.Request) *Error {
	if !s.hostAllowed(r) {
		return &Error{
			Status: http.StatusForbidden, Type: TypePermission, Code: CodeHostNotAllowed,
			Message: "the Host header names neither this machine nor an allowed origin; see --allowed-origins",
		}
	}
	if origin := r.Header.Get("Origin"); origin != "" {
		w.Header().Add("Vary", "Origin")
		if !s.originAllowed(origin, r.Host) {
			return &Error{
				Status: http.StatusForbidden, Type: TypePermission, Code: CodeOriginRefused,
				Message: "pages of another origin may not call this server; see --allowed-origins",
			}
		}
		w.Header().Set("Access-Control-Allow-Origin", origin)
		w.Header().Set("Access-Control-Expose-Headers", "X-Request-Id, Retry-After")
	}
	if r.Method == http.MethodOptions || open(r.URL.Path) || s.keyAllowed(r) { // a preflight carries no key
		return nil
	}
	return &Error{
		Status: http.StatusUnauthorized, Type: TypeAuthentication, Code: CodeInvalidKey,
		Message: "this server asks for an API key, in the header Authorization: Bearer KEY",
	}
}

// open tells which paths need no key: they tell nothing but whether the server works.
func open(path string) bool { return path == pathHealth || path == pathHealthV1 || path == pathLive }

// hostAllowed stops DNS rebinding: a page whose name resolves to this machine would be of the same origin, but can't choose the
// Host header.
func (s *Server) hostAllowed(r *http.Request) bool {
	addr, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok || !isLoopback(hostOf(addr.String())) || r.Host == "" {
		return true
	}
	host := hostOf(r.Host)
	_, notAddress := netip.ParseAddr(host) // an address can't be made to mean another machine
	if notAddress == nil || isLoopback(host) || strings.EqualFold(host, s.cfg.Host) {
		return true
	}
	return slices.ContainsFunc(s.cfg.AllowedOrigins, func(origin string) bool {
		u, err := url.Parse(origin)
		return origin == "*" || err == nil && strings.EqualFold(u.Hostname(), host)
	})
}

// hostOf returns the host of "host:port", without the brackets of IPv6.
func hostOf(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return strings.Trim(hostport, "[]")
}

func isLoopback(host string) bool {
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if host == "localhost" || strings.HasSuffix(host, ".localhost") { // RFC 6761: always this machine
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

func (s *Server) originAllowed(origin, host string) bool {
	if slices.Contains(s.cfg.AllowedOrigins, "*") || slices.Contains(s.cfg.AllowedOrigins, origin) {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && u.Host != "" && strings.EqualFold(u.Host, host)
}

// keyAllowed compares the digest of the key with that of every key, so that the time tells nothing about them.
func (s *Server) keyAllowed(r *http.Request) bool {
	if len(s.keys) == 0 {
		return true
	}
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	given := sha256.Sum256([]byte(strings.TrimSpace(key)))
	equal := 0
	for _, k := range s.keys {
		equal |= subtle.ConstantTimeCompare(given[:], k[:])
	}
	return equal == 1 && strings.EqualFold(scheme, "Bearer")
}

// preflight tells a page of an allowed origin that it may send what it wants to.
func preflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Methods", "GET, POST, OPTIONS")
	h.Set("Access-Control-Allow-Headers", r.Header.Get("Access-Control-Request-Headers"))
	h.Set("Access-Control-Max-Age", "600")
	if r.Header.Get("Access-Control-Request-Private-Network") == "true" {
		h.Set("Access-Control-Allow-Private-Network", "true")
	}
	w.WriteHeader(http.StatusNoContent)
}
