//! One authenticated and authorized request for a resource.

use std::sync::Arc;

use bytes::Bytes;
use coracle_admission_policies::RequestCost;
use coracle_kinds::{
    Resource,
    protobuf::encode,
    schema::{FieldValidation, Parsed},
    validate::{Causes, Path},
};
use http::HeaderMap;
use serde_json::Value;

use crate::{
    admit::{Attributes, Operation, RequestOptions},
    audit::Record,
    authn::User,
    body::{self, Expected},
    cache::Object,
    error::{ApiError, Result},
    media::{self, BodyType, Form},
    object_meta::text,
    offload::MIN_OFFLOADED_BYTES,
    request::{Query, RequestInfo, ResourceInfo},
    state::State,
    warnings::Warnings,
};

/// Kinds that controllers of this process create with generated names, as group and kind.
const GENERATED: [(&str, &str); 3] =
    [("", "Pod"), ("discovery.k8s.io", "EndpointSlice"), ("resource.k8s.io", "ResourceClaim")];

/// Name of the user of [`Call::internal`].
pub(crate) const INTERNAL_USER: &str = "system:apiserver";

pub(crate) struct Call {
    pub(crate) state: Arc<State>,
    pub(crate) user: User,
    pub(crate) info: RequestInfo,
    pub(crate) resource: ResourceInfo,
    pub(crate) kind: Arc<Resource>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) warnings: Warnings,
    /// The accumulated cost of the expressions of admission policies.
    pub(crate) cost: RequestCost,
    /// The audit record, if the request is recorded.
    pub(crate) audit: Option<Arc<Record>>,
}

// === impl Call ===

impl Call {
    /// A call that the server makes on its own behalf.
    pub(crate) fn internal(state: &Arc<State>, kind: Arc<Resource>, object: &Value) -> Self {
        let resource = ResourceInfo {
            group: kind.group.clone().into_owned(),
            version: kind.version.clone().into_owned(),
            namespace: text(object, "namespace").to_owned(),
            resource: kind.plural.clone().into_owned(),
            ..ResourceInfo::default()
        };
        let info = RequestInfo {
            verb: "create",
            path: String::new(),
            query: Query::default(),
            resource: Some(resource.clone()),
        };
        Self {
            state: state.clone(),
            user: User::new(INTERNAL_USER, &["system:masters"]),
            info,
            resource,
            kind,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            warnings: Warnings::default(),
            cost: RequestCost::default(),
            audit: None,
        }
    }

    /// Decodes the body as an object of the call's own kind. Returns the object and warnings.
    pub(crate) async fn object(&self) -> Result<(Value, Vec<String>)> {
        self.decode(&Expected::of(&self.kind).with_initializers(self.has_initializers())).await
    }

    /// Whether `metadata.initializers` is supported: the plugin Initializers runs.
    pub(crate) fn has_initializers(&self) -> bool {
        self.state.admission.initialization.is_some()
    }

    /// Whether the response includes uninitialized objects. The controllers of this process need them to count the
    /// objects that they created with generated names. The garbage collector, which reads only metadata, needs them to
    /// find all dependents.
    pub(crate) fn includes_uninitialized(&self) -> bool {
        let is_generated = || GENERATED.iter().any(|(group, kind)| self.kind.is(group, kind));
        let is_controller = || {
            is_generated()
                || self.form().is_ok_and(|form| matches!(form, Form::Partial(_) | Form::PartialProtobuf(_)))
        };
        self.info.query.flag("includeUninitialized") || (self.user.is_component() && is_controller())
    }

    /// Decodes the body as an object of an expected kind. Returns the object and warnings.
    pub(crate) async fn decode(&self, expected: &Expected<'_>) -> Result<(Value, Vec<String>)> {
        let record = |sent: &Value| self.record_object(sent);
        body::decode(&self.headers, &self.body, expected, self.validation()?, record).await
    }

    /// Parses the body without a check of its type.
    pub(crate) async fn parse(&self) -> Result<Parsed> {
        body::parse(&self.headers, &self.body, |sent| self.record_object(sent)).await
    }

    /// Records the parsed body in the audit event, if the audit policy requires it.
    pub(crate) fn record_object(&self, sent: &Value) {
        if let Some(record) = &self.audit {
            record.receive_object(&self.info, sent);
        }
    }

    /// Adds the warnings about a valid object of the call's own kind. `old` is the stored object of an update.
    pub(crate) fn warn_about(&self, new: &Value, old: Option<&Value>) {
        self.warnings.add_about(&self.kind, new, old);
        if let Some(ranges) = self.state.external_ips.as_deref().filter(|_| self.kind.is("", "Service")) {
            self.warnings.add_about_external_ips(new, ranges);
        }
    }

    /// The attributes for admission. `old` is the stored object.
    pub(crate) fn attributes<'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        old: Option<&'a Value>,
    ) -> Attributes<'a> {
        Attributes {
            kind: &self.kind,
            operation,
            verb: self.info.verb,
            namespace: self.namespace(),
            name,
            is_prefix: false,
            subresource: &self.resource.subresource,
            declared: self.kind.subresource(&self.resource.subresource),
            user: &self.user,
            old,
            dry_run: self.dry_run().unwrap_or(false),
            options: RequestOptions::Parameters(&self.info.query),
            warnings: &self.warnings,
            cost: &self.cost,
            audit: self.audit.as_deref(),
            initializers: self.has_initializers(),
        }
    }

    /// Runs admission for the object of a subresource request. Returns the admitted object.
    pub(crate) async fn admit_subresource(&self, operation: Operation, object: Value) -> Result<Value> {
        let attributes = self.attributes(operation, &self.resource.name, None);
        self.state.admission.admit_subresource(&attributes, object).await
    }

    /// Checks that the user may also use another verb on the resource of the request.
    pub(crate) async fn authorize_also(&self, verb: &str) -> Result<()> {
        let (state, resource) = (&self.state, self.resource.clone());
        state.authorizers.authorize_also(&state.cache, &self.user, verb, resource).await
    }

    /// Whether work on the body must run outside of the async workers.
    pub(crate) fn has_large_body(&self) -> bool {
        self.body.len() > MIN_OFFLOADED_BYTES
    }

    /// Whether the parsing of the body as YAML may take so long that it must not run on an async worker.
    pub(crate) fn has_slow_yaml(&self) -> bool {
        self.has_large_body() || body::is_slow_yaml(&self.body)
    }

    /// Whether the body is a JSON patch. Even a short patch may take tenths of a second.
    pub(crate) fn has_json_patch(&self) -> bool {
        media::body_type(&self.headers).is_ok_and(|body_type| body_type == BodyType::JsonPatch)
    }

    /// The form of the response that the client prefers.
    pub(crate) fn form(&self) -> Result<Form> {
        let is_list = matches!(self.info.verb, "list" | "deletecollection");
        let mut forms = vec!["Table", if is_list { media::METADATA_LIST } else { media::METADATA }];
        // The audit log records responses as JSON.
        if self.audit.as_ref().is_some_and(|record| record.has_response_object()) {
            return media::negotiate(&self.headers, &self.info.query, &forms);
        }
        forms.push(media::PROTOBUF_METADATA);
        if self.kind.is_stored() && encode::is_supported(self.kind.api_version(), &self.kind.kind) {
            forms.push(media::PROTOBUF);
        }
        media::negotiate(&self.headers, &self.info.query, &forms)
    }

    pub(crate) fn dry_run(&self) -> Result<bool> {
        let values = self.info.query.all("dryRun");
        if values.iter().any(|value| value != "All") {
            return Err(self.invalid_parameter(|causes| {
                causes.unsupported(&Path::root("dryRun"), &serde_json::json!(values), &["All"]);
            }));
        }
        Ok(!values.is_empty())
    }

    pub(crate) fn validation(&self) -> Result<FieldValidation> {
        match self.info.query.get("fieldValidation") {
            "" | "Warn" => Ok(FieldValidation::Warn),
            "Ignore" => Ok(FieldValidation::Ignore),
            "Strict" => Ok(FieldValidation::Strict),
            other => Err(self.invalid_parameter(|causes| {
                let known = &["", "Ignore", "Strict", "Warn"];
                causes.unsupported(&Path::root("fieldValidation"), &other.into(), known);
            })),
        }
    }

    /// The error of invalid parameters. `describe` adds the causes.
    pub(crate) fn invalid_parameter(&self, describe: impl FnOnce(&mut Causes)) -> ApiError {
        let options = match self.info.verb {
            "create" => "CreateOptions",
            "update" => "UpdateOptions",
            "patch" => "PatchOptions",
            "delete" | "deletecollection" => "DeleteOptions",
            _ => "ListOptions",
        };
        let mut causes = Causes::default();
        describe(&mut causes);
        ApiError::invalid_parameters(options, "meta.k8s.io", &causes.into_list())
    }

    /// The namespace in the keys of this kind's objects.
    pub(crate) fn namespace(&self) -> &str {
        if self.kind.namespaced { &self.resource.namespace } else { "" }
    }

    /// The current object of this name, of the call's kind and namespace. The error is `NotFound`, or `InternalError`
    /// if the object cannot be decrypted and no former state is known.
    pub(crate) fn current(&self, name: &str) -> Result<Arc<Object>> {
        let object = self.state.cache.find(&self.kind, self.namespace(), name)?;
        object.ok_or_else(|| ApiError::not_found(&self.kind, name))
    }
}
