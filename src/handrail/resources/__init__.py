"""Resources: objects that tools request by protocol, such as the run's files."""

from handrail.resources.bindings import Binding, CallResources, RunResources, Scope, given

__all__ = ["Binding", "CallResources", "RunResources", "Scope", "given"]
