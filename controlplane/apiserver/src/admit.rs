//! Admission: mutating plugins in order, then validating plugins. Each plugin has its own file.
//!
//! A plugin returns immediately unless it calls another server.

mod bootstrap_token;
mod certificate;
mod claim_status;
mod config;
mod default_tolerations;
mod device_admin_access;
mod escalation;
mod expression;
mod initializers;
mod limit_ranger;
mod limited_resources;
mod matching;
mod member;
mod mountable_secrets;
mod namespace_lifecycle;
mod node_restriction;
mod node_taints;
mod optional;
mod plugins;
mod pod_groups;
mod pod_resize;
mod pod_security;
mod policy;
pub(crate) mod priority;
mod review;
mod runtime_class;
mod scale_object;
mod service_account;
mod storage;
mod toleration;
mod webhook;

use std::{sync::Arc, time::Instant};

use async_trait::async_trait;
use coracle_admission_policies::RequestCost;
use coracle_kinds::{
    Resource, initializers::is_uninitialized, quota::LimitedResource, resource::Subresource,
};
use serde_json::Value;

use crate::{
    audit::Record,
    authn::User,
    authz::Authorizers,
    cache::Cache,
    error::Result,
    in_flight::InFlight,
    initialization::Initialization,
    metrics::{Metrics, Step},
    registry::Registry,
    request::{Query, ResourceInfo},
    usage_history::UsageHistory,
    warnings::Warnings,
};
pub(crate) use config::PluginConfigs;
pub use default_tolerations::TolerationSeconds;
use member::Member;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use optional::fuzz_image_review;
pub use plugins::PluginSelection;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use review::fuzz as fuzz_review;

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
    /// The verb of the request: `update` or `patch` for an update.
    pub(crate) verb: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    /// Whether `name` is the prefix of a name that is generated later.
    pub(crate) is_prefix: bool,
    pub(crate) subresource: &'a str,
    /// The declaration of the subresource.
    pub(crate) declared: Option<&'a Subresource>,
    pub(crate) user: &'a User,
    /// The stored object. `None` for a new object.
    pub(crate) old: Option<&'a Value>,
    /// Whether the request is a dry run: nothing is stored.
    pub(crate) dry_run: bool,
    /// The options of the request, for webhooks and policies.
    pub(crate) options: RequestOptions<'a>,
    /// Warnings for the client.
    pub(crate) warnings: &'a Warnings,
    /// The accumulated cost of the expressions of the request.
    pub(crate) cost: &'a RequestCost,
    /// The audit record, if the request is recorded.
    pub(crate) audit: Option<&'a Record>,
    /// Whether objects have `metadata.initializers`.
    pub(crate) initializers: bool,
}

/// The source of the options of a request, which webhooks and policies get as `options`.
#[derive(Clone, Copy)]
pub(crate) enum RequestOptions<'a> {
    /// The parameters of a create, an update or a patch.
    Parameters(&'a Query),
    /// The DeleteOptions of a deletion. Null without options.
    Deletion(&'a Value),
}

/// An admission plugin. `mutate` and `validate` do nothing by default.
#[async_trait]
pub(crate) trait Admit: Send + Sync {
    /// Changes an object.
    async fn mutate(
        &self,
        _admission: &Admission,
        _attributes: &Attributes<'_>,
        _object: &mut Value,
    ) -> Result<()> {
        Ok(())
    }

    /// Accepts or refuses an object. For a deletion this is the stored object.
    async fn validate(
        &self,
        _admission: &Admission,
        _attributes: &Attributes<'_>,
        _object: &Value,
    ) -> Result<()> {
        Ok(())
    }

    /// Changes an object again after a webhook has changed it. Local plugins run `mutate` again.
    async fn reinvoke(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if self.is_local() { self.mutate(admission, attributes, object).await } else { Ok(()) }
    }

    /// Whether the plugin is local: it calls no other server, and its rules are not objects of the API.
    fn is_local(&self) -> bool {
        true
    }

    /// Whether `validate` of a create or an update runs before the validation of the object. This is true for plugins
    /// that upstream runs in the mutating phase or in the storage. It is also true for checks of permissions, because
    /// an error of the validation must not reveal an object that the client cannot read.
    fn precedes_validation(&self) -> bool {
        false
    }

    /// Whether the plugin also runs for subresources with their own object, such as `pods/binding`.
    fn handles_own_objects(&self) -> bool {
        !self.is_local()
    }

    /// Whether the plugin also runs for reviews, such as SubjectAccessReview. As upstream, policies do not run for
    /// reviews, because a policy for all resources could disable the cluster.
    fn handles_reviews(&self) -> bool {
        false
    }
}

/// Creates missing namespaces through the write pipeline. This is a trait, because the write pipeline depends on
/// admission.
#[async_trait]
pub(crate) trait CreateNamespace: Send + Sync {
    /// Creates a namespace. It is not an error if the namespace exists.
    async fn create(&self, name: &str) -> Result<()>;
}

/// The plugins that run.
pub(crate) struct Plugins {
    /// The plugins in the order of the chain.
    members: Vec<Member>,
    /// Whether requests are charged to the quotas of their namespace.
    pub(crate) charges_quota: bool,
    /// Resources whose use needs a quota.
    pub(crate) limited: Vec<LimitedResource>,
}

/// The chain of plugins, and the services that they use.
pub(crate) struct Admission {
    pub(crate) plugins: Plugins,
    pub(crate) cache: Arc<Cache>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) authorizers: Arc<Authorizers>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) namespaces: Box<dyn CreateNamespace>,
    /// The waiting creates. `None` without the plugin Initializers.
    pub(crate) initialization: Option<Arc<Initialization>>,
    /// The usage of images. `None` without the plugin InitialResources.
    pub(crate) usage_history: Option<Arc<UsageHistory>>,
    pub(crate) toleration_seconds: TolerationSeconds,
}

impl Operation {
    /// The name in rules and in reviews.
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
    /// The name in the request. Empty if the name is generated later.
    pub(crate) fn known_name(&self) -> &'a str {
        if self.is_prefix { "" } else { self.name }
    }

    /// The subresource, if the request's object is of the subresource's kind: for example a Binding instead of a Pod.
    pub(crate) fn own_object(&self) -> Option<&'a Subresource> {
        self.shown_as().filter(|declared| declared.name != "scale")
    }

    /// The subresource, if webhooks and policies get an object of the subresource's kind: [`Self::own_object`], or a
    /// Scale, which stands for its workload.
    fn shown_as(&self) -> Option<&'a Subresource> {
        self.declared.filter(|declared| declared.kind != self.kind.kind)
    }

    /// Whether the request changes the resources of a pod through `/resize`.
    pub(crate) fn is_resize(&self) -> bool {
        self.operation == Operation::Update && self.subresource == "resize" && self.kind.is("", "Pod")
    }

    /// Whether the request creates a pod, or changes an uninitialized pod. The whole spec of such a pod can change.
    pub(crate) fn writes_new_pod(&self) -> bool {
        let is_uninitialized = || self.old.is_some_and(is_uninitialized);
        self.is(Operation::Create, "Pod") || (self.is(Operation::Update, "Pod") && is_uninitialized())
    }

    pub(crate) fn is(&self, operation: Operation, kind: &str) -> bool {
        self.operation == operation && self.subresource.is_empty() && self.kind.is("", kind)
    }
}

/// A running step of admission. The metrics count it when this value is dropped. A cancelled step counts as rejected.
struct MeasuredStep<'a> {
    metrics: &'a Metrics,
    operation: &'static str,
    step: Step,
    began: Instant,
    is_passed: bool,
}

// === impl MeasuredStep ===

impl<'a> MeasuredStep<'a> {
    fn new(admission: &'a Admission, attributes: &Attributes<'_>, step: Step) -> Self {
        let operation = attributes.operation.name();
        Self { metrics: &admission.metrics, operation, step, began: Instant::now(), is_passed: false }
    }
}

impl Drop for MeasuredStep<'_> {
    fn drop(&mut self) {
        let took = self.began.elapsed();
        self.metrics.admission.step(self.step, self.operation, !self.is_passed, took);
    }
}

// === impl Plugins ===

impl Plugins {
    /// The selected plugins, with their configurations.
    ///
    /// # Errors
    /// The name of a plugin is unknown, or a configuration is invalid.
    pub(crate) fn new(
        configs: PluginConfigs,
        selection: &PluginSelection,
    ) -> std::result::Result<Self, String> {
        plugins::chain(configs, selection)
    }

    fn all(&self) -> impl Iterator<Item = &Member> {
        self.members.iter()
    }
}

// === impl Admission ===

impl Admission {
    /// Runs the mutating plugins.
    pub(crate) async fn mutate(&self, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        let mut measured = MeasuredStep::new(self, attributes, Step::Admit);
        for member in self.plugins.all() {
            member.mutate(self, attributes, object).await?;
        }
        measured.is_passed = true;
        Ok(())
    }

    /// Runs the validating plugins.
    pub(crate) async fn validate(&self, attributes: &Attributes<'_>, object: &Value) -> Result<()> {
        let mut measured = MeasuredStep::new(self, attributes, Step::Validate);
        for member in self.plugins.all() {
            member.validate(self, attributes, object).await?;
        }
        measured.is_passed = true;
        Ok(())
    }

    /// Runs the validating plugins that precede the validation of the object.
    pub(crate) async fn validate_before(&self, attributes: &Attributes<'_>, object: &Value) -> Result<()> {
        for member in self.plugins.all().filter(|member| member.plugin.precedes_validation()) {
            member.validate(self, attributes, object).await?;
        }
        Ok(())
    }

    /// Runs the validating plugins for a valid object, except the plugins of [`Admission::validate_before`].
    pub(crate) async fn validate_after(&self, attributes: &Attributes<'_>, object: &Value) -> Result<()> {
        let mut measured = MeasuredStep::new(self, attributes, Step::Validate);
        for member in self.plugins.all().filter(|member| !member.plugin.precedes_validation()) {
            member.validate(self, attributes, object).await?;
        }
        measured.is_passed = true;
        Ok(())
    }

    /// Runs policies, webhooks and a few plugins for a subresource with its own object. Returns the object.
    pub(crate) async fn admit_subresource(
        &self,
        attributes: &Attributes<'_>,
        mut object: Value,
    ) -> Result<Value> {
        for member in self.plugins.all().filter(|member| member.plugin.handles_own_objects()) {
            member.mutate(self, attributes, &mut object).await?;
        }
        for member in self.plugins.all().filter(|member| member.plugin.handles_own_objects()) {
            member.validate(self, attributes, &object).await?;
        }
        Ok(object)
    }

    /// Runs the mutating webhooks for a review.
    pub(crate) async fn mutate_review(&self, attributes: &Attributes<'_>, review: &mut Value) -> Result<()> {
        for member in self.plugins.all().filter(|member| member.plugin.handles_reviews()) {
            member.mutate(self, attributes, review).await?;
        }
        Ok(())
    }

    /// Runs the validating webhooks for a review.
    pub(crate) async fn validate_review(&self, attributes: &Attributes<'_>, review: &Value) -> Result<()> {
        for member in self.plugins.all().filter(|member| member.plugin.handles_reviews()) {
            member.validate(self, attributes, review).await?;
        }
        Ok(())
    }

    /// Runs the local plugins, and the policies with `reinvocationPolicy: IfNeeded`, again after a webhook has changed
    /// the object.
    async fn reinvoke(&self, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        for member in self.plugins.all() {
            member.plugin.reinvoke(self, attributes, object).await?;
        }
        Ok(())
    }

    /// Runs the local plugins again after a policy has changed the object.
    async fn complete(&self, attributes: &Attributes<'_>, object: &mut Value) -> Result<()> {
        for member in self.plugins.all().filter(|member| member.plugin.is_local()) {
            member.mutate(self, attributes, object).await?;
        }
        Ok(())
    }

    /// Checks that the user has another permission in addition to the permission for the request.
    async fn authorize_also(&self, user: &User, verb: &str, resource: ResourceInfo) -> Result<()> {
        self.authorizers.authorize_also(&self.cache, user, verb, resource).await
    }
}
