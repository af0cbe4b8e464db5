"""Resources: objects, such as the run's files, that tools request by protocol."""

from handrail.resources.bindings import Binding, CallResources, RunResources, Scope, given

__all__ = ["Binding", "CallResources", "RunResources", "Scope", "given"]
