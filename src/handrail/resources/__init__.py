"""Resources: what tools work with, among them files."""

from handrail.resources.bindings import Binding, CallResources, RunResources, Scope, given

__all__ = ["Binding", "CallResources", "RunResources", "Scope", "given"]
