//! Admission: mutating plugins in order, then validating plugins. Each plugin has its own file.
//!
//! A member returns at once unless it needs another server.

mod bootstrap_token;
mod certificate;
mod default_tolerations;
mod device_admin_access;
mod escalation;
mod expression;
mod limit_ranger;
mod matching;
mod mountable_secrets;
mod namespace_lifecycle;
mod node_restriction;
mod node_taints;
mod optional;
mod plugins;
mod pod_resize;
mod pod_security;
mod policy;
pub(crate) mod priority;
mod runtime_class;
mod service_account;
mod storage;
mod webhook;

use async_trait::async_trait;
use coracle_admission_policies::RequestCost;
use coracle_kinds::{Resource, resource::Subresource};
use serde_json::Value;

use crate::{
    audit::Record,
    authn::User,
    call::{Call, Warnings},
    error::Result,
    server::State,
};
pub use plugins::PluginSelection;
pub(crate) use pod_security::PodSecurityConfig;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
    /// A request that opens a stream into a pod.
    Connect,
}

/// The group of webhook configurations and policies.
const GROUP: &str = "admissionregistration.k8s.io";

/// The attributes of a request for admission plugins.
pub(crate) struct Attributes<'a> {
    pub(crate) kind: &'a Resource,
    pub(crate) operation: Operation,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) subresource: &'a str,
    /// The subresource as the kind declares it.
    pub(crate) declared: Option<&'a Subresource>,
    pub(crate) user: &'a User,
    /// The stored object; `None` for a new one.
    pub(crate) old: Option<&'a Value>,
    /// Whether the request is a dry run: nothing is stored.
    pub(crate) dry_run: bool,
    /// Warnings for the client.
    pub(crate) warnings: &'a Warnings,
    /// The cost of the expressions of the request.
    pub(crate) cost: &'a RequestCost,
    /// The audit record, if the request is recorded.
    pub(crate) audit: Option<&'a Record>,
}

/// An admission plugin. `mutate` and `validate` do nothing by default.
#[async_trait]
pub(crate) trait Admit: Send + Sync {
    /// Changes an object.
    async fn mutate(&self, _state: &State, _attributes: &Attributes<'_>, _object: &mut Value) -> Result<()> {
        Ok(())
    }

    /// Accepts or refuses an object. For deletions it is the stored one.
    async fn validate(&self, _state: &State, _attributes: &Attributes<'_>, _object: &Value) -> Result<()> {
        Ok(())
    }

    /// Changes an object again, after a webhook has changed it. Local members repeat `mutate`.
    async fn reinvoke(&self, state: &State, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        if self.is_local() { self.mutate(state, attributes, object).await } else { Ok(()) }
    }

    /// Whether the member is compiled in: it calls no other server and has no configuration in the API.
    fn is_local(&self) -> bool {
        true
    }
}

pub(crate) struct Admission {
    chain: Vec<Box<dyn Admit>>,
}

impl Operation {
    /// As in rules and in reviews.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
            Self::Connect => "CONNECT",
        }
    }
}

impl<'a> Attributes<'a> {
    pub(crate) fn new(call: &'a Call, operation: Operation, name: &'a str, old: Option<&'a Value>) -> Self {
        Self {
            kind: &call.kind,
            operation,
            namespace: call.namespace(),
            name,
            subresource: &call.resource.subresource,
            declared: call.kind.subresource(&call.resource.subresource),
            user: &call.user,
            old,
            dry_run: call.dry_run().unwrap_or(false),
            warnings: &call.warnings,
            cost: &call.cost,
            audit: call.audit.as_deref(),
        }
    }

    /// The subresource if the object of the request is of its kind, not of the resource's: a Binding, not a Pod.
    pub(crate) fn own_object(&self) -> Option<&'a Subresource> {
        self.declared.filter(|declared| declared.kind != self.kind.kind && declared.name != "scale")
    }

    /// Whether the request changes the resources of a pod by `/resize`.
    pub(crate) fn is_resize(&self) -> bool {
        self.operation == Operation::Update && self.subresource == "resize" && self.kind.is("", "Pod")
    }

    pub(crate) fn is(&self, operation: Operation, kind: &str) -> bool {
        self.operation == operation && self.subresource.is_empty() && self.kind.is("", kind)
    }
}

impl Admission {
    /// # Errors
    /// The name of an unknown plugin.
    pub(crate) fn new(
        pod_security: PodSecurityConfig,
        selection: &PluginSelection,
    ) -> std::result::Result<Self, String> {
        Ok(Self { chain: plugins::chain(pod_security, selection)? })
    }

    pub(crate) async fn mutate(
        &self,
        state: &State,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        for member in &self.chain {
            member.mutate(state, attributes, object).await?;
        }
        Ok(())
    }

    /// Runs the local members again after a webhook has changed the object, and policies with
    /// `reinvocationPolicy: IfNeeded`.
    async fn reinvoke(&self, state: &State, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        for member in &self.chain {
            member.reinvoke(state, attributes, object).await?;
        }
        Ok(())
    }

    /// Runs policies and webhooks for a subresource that has an object of its own. Returns the object.
    pub(crate) async fn admit_subresource(
        &self,
        call: &Call,
        operation: Operation,
        mut object: Value,
    ) -> Result<Value> {
        let attributes = Attributes::new(call, operation, &call.resource.name, None);
        for member in self.chain.iter().filter(|member| !member.is_local()) {
            member.mutate(&call.state, &attributes, &mut object).await?;
        }
        for member in self.chain.iter().filter(|member| !member.is_local()) {
            member.validate(&call.state, &attributes, &object).await?;
        }
        Ok(object)
    }

    /// Runs the local members again, after a policy has changed the object.
    async fn complete(&self, state: &State, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        for member in self.chain.iter().filter(|member| member.is_local()) {
            member.mutate(state, attributes, object).await?;
        }
        Ok(())
    }

    pub(crate) async fn validate(
        &self,
        state: &State,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        for member in &self.chain {
            member.validate(state, attributes, object).await?;
        }
        Ok(())
    }
}
