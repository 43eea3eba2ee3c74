package bringup

import (
	"errors"
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/host/cluster"
	"github.com/mlxcel/mlxcel/host/cluster/bringup/internal/pb"
	"github.com/mlxcel/mlxcel/host/pipeline"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Refusals beside those of package cluster.
const (
	CodeOrder   cluster.Code = "out-of-order" // a message that does not fit the phase
	CodeMessage cluster.Code = "bad-message"  // a message that no peer of this version sends
	CodeConfig  cluster.Code = "cluster-file" // the cluster's TOML is no good to the peer
	CodeStage   cluster.Code = "stage"        // the executor could not be started, or did not load
	CodeNode    cluster.Code = "node-id"      // two peers call themselves the same
	CodeLink    cluster.Code = "stage-link"   // no connection to the next stage, or one that fails its self-test
)

// NodeError says which node a bring-up, or a cluster that ran, failed at.
type NodeError struct {
	Stage   int
	Node    string // its id in the cluster's configuration
	Address string // as the operator gave it
	Phase   Phase  // that the node was in
	Err     error  // often a *cluster.Refusal
}

func (e *NodeError) Error() string {
	text := e.Err.Error()
	if s, ok := e.Err.(*pipeline.StageError); ok { // which would say again what stage it is
		text = s.Err.Error()
		if s.Phase != "" {
			text = fmt.Sprintf("%s failed in %s: %s", s.Plugin, s.Phase, text)
		}
	}
	return fmt.Sprintf("stage %d (%s at %s, %s): %s", e.Stage, e.Node, e.Address, e.Phase, text)
}

func (e *NodeError) Unwrap() error { return e.Err }

// maxErrorText bounds a text that crosses the control connection; gRPC limits its trailers.
const maxErrorText = 4 << 10

func clip(text string) string {
	if len(text) <= maxErrorText {
		return text
	}
	return strings.ToValidUTF8(text[:maxErrorText], "") + "…"
}

// toStatus is an error as a call's answer.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*OrderError](err); ok {
		err = &cluster.Refusal{Code: CodeOrder, Reason: e.Error(), Remedy: "install the same version of mlxcel on every host"}
	}
	r, ok := errors.AsType[*cluster.Refusal](err)
	if !ok {
		return status.Error(codes.Aborted, clip(err.Error()))
	}
	detail := &pb.Refusal{Code: string(r.Code), Reason: clip(r.Reason), Remedy: clip(r.Remedy)}
	s, err := status.New(codes.FailedPrecondition, clip(r.Error())).WithDetails(detail)
	if err != nil { // texts that are no UTF-8
		return status.Error(codes.FailedPrecondition, strings.ToValidUTF8(clip(r.Error()), "?"))
	}
	return s.Err()
}

// fromStatus is what toStatus made a call's answer of.
func fromStatus(err error) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return err
	}
	for _, d := range s.Details() {
		if r, ok := d.(*pb.Refusal); ok {
			return &cluster.Refusal{Code: cluster.Code(r.GetCode()), Reason: r.GetReason(), Remedy: r.GetRemedy()}
		}
	}
	if s.Code() == codes.Aborted {
		return errors.New(s.Message())
	}
	return err
}
