//! Initializers: adds the initializers of the InitializerConfigurations to new objects. Only users with the verb
//! `initialize` can change `metadata.initializers` and uninitialized objects.
//!
//! Source: `admission/plugin/initialization`, v1.9 to v1.13.

use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use coracle_kinds::{
    Resource,
    initializers::{self, is_uninitialized},
    validate,
};
use coracle_values::string_list;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes, Operation};
use crate::{
    error::{ApiError, Result},
    request::ResourceInfo,
};

/// Annotation of mirror pods.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// The subresources that change the spec.
const OF_SPEC: [&str; 3] = ["scale", "resize", "ephemeralcontainers"];
/// The message for users without the verb.
const UPDATE_DENIED: &str = "update to uninitialized resource denied";

/// Adds initializers to objects, and protects these initializers.
#[derive(Default)]
pub(super) struct Initializers {
    /// The initializers of all configurations, as of a revision.
    parsed: RwLock<(u64, Arc<[Initializer]>)>,
}

/// An initializer of a configuration.
struct Initializer {
    name: String,
    rules: Vec<Rule>,
}

/// The resources to which an initializer applies.
struct Rule {
    groups: Vec<String>,
    versions: Vec<String>,
    resources: Vec<String>,
}

#[async_trait]
impl Admit for Initializers {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        match (attributes.operation, attributes.subresource, attributes.old) {
            (Operation::Create, "", _) => self.create(admission, attributes, object).await,
            (Operation::Update, "", Some(old)) => update(admission, attributes, object, old).await,
            (Operation::Update, subresource, Some(old))
                if OF_SPEC.contains(&subresource) && is_uninitialized(old) =>
            {
                may_initialize(admission, attributes, UPDATE_DENIED).await
            }
            _ => Ok(()),
        }
    }

    /// The plugin runs after the webhooks. A second run would regard the initializers that the first run has added as
    /// initializers of the user.
    fn is_local(&self) -> bool {
        false
    }
}

// === impl Initializers ===

impl Initializers {
    async fn create(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if is_uninitialized(object) {
            may_initialize(admission, attributes, "create with initializers denied").await?;
            let causes = validate::initializers::creation(object);
            if !causes.is_empty() {
                return Err(ApiError::invalid(attributes.kind, attributes.name, &causes));
            }
            if !initializers::is_pending(object) {
                initializers::set(object, None);
            }
            return Ok(());
        }
        // The annotation counts only for nodes, because any author of a pod could set it.
        let is_mirror = attributes.kind.is("", "Pod")
            && attributes.user.node().is_some()
            && !object["metadata"]["annotations"][MIRROR].is_null();
        if is_mirror || is_of_server(attributes) {
            return Ok(());
        }
        let all = self.current(admission)?;
        let chosen = all.iter().filter(|one| one.selects(attributes.kind));
        let pending: Vec<Value> = chosen.map(|one| json!({"name": one.name})).collect();
        if !pending.is_empty() {
            initializers::set(object, Some(json!({"pending": pending})));
        }
        Ok(())
    }

    /// The initializers. They are parsed again if a configuration has changed.
    ///
    /// # Errors
    /// `InternalError` if a configuration cannot be decrypted and no former state is known.
    fn current(&self, admission: &Admission) -> Result<Arc<[Initializer]>> {
        let resources = admission.registry.load();
        let kind = resources.find(initializers::GROUP, initializers::VERSION, initializers::PLURAL);
        let Some(kind) = kind else { return Ok(Arc::new([])) };
        admission.cache.check_complete(kind, "")?;
        let newest = admission.cache.of(kind).map_or(0, |collection| collection.lock().newest());
        let (of, known) = self.parsed.read().unwrap_or_else(PoisonError::into_inner).clone();
        if of == newest {
            return Ok(known);
        }
        // The objects may be newer than this revision. In this case, the next call parses them once more. The
        // configurations are ordered by name.
        let configurations = admission.cache.list(kind, "");
        let parsed: Arc<[Initializer]> = configurations
            .iter()
            .map(|configuration| configuration.value())
            .filter(|configuration| !is_uninitialized(configuration))
            .flat_map(|configuration| configuration["initializers"].as_array().cloned().unwrap_or_default())
            .map(|initializer| Initializer::read(&initializer))
            .collect();
        *self.parsed.write().unwrap_or_else(PoisonError::into_inner) = (newest, parsed.clone());
        Ok(parsed)
    }
}

/// Checks an update of an object that is or was uninitialized.
async fn update(
    admission: &Admission,
    attributes: &Attributes<'_>,
    new: &mut Value,
    old: &Value,
) -> Result<()> {
    if is_uninitialized(new) && is_empty(new) {
        // The last initializer has removed its entry, or the client sends empty initializers for an initialized object.
        initializers::set(new, None);
    }
    if !is_uninitialized(new) && !is_uninitialized(old) {
        return Ok(());
    }
    let causes = validate::initializers::change(new, old);
    if !causes.is_empty() {
        return Err(ApiError::invalid(attributes.kind, attributes.name, &causes));
    }
    may_initialize(admission, attributes, UPDATE_DENIED).await
}

/// Whether the initializers of an object are neither pending nor failed.
fn is_empty(object: &Value) -> bool {
    !initializers::is_pending(object) && initializers::failure(object).is_none()
}

/// Whether the server itself sends the request. The server could not start if its objects waited for initializers.
fn is_of_server(attributes: &Attributes<'_>) -> bool {
    attributes.user.name == "system:apiserver" && attributes.user.is_in("system:masters")
}

/// Refuses users without the verb `initialize` for the object.
async fn may_initialize(admission: &Admission, attributes: &Attributes<'_>, why: &str) -> Result<()> {
    let Attributes { kind, namespace, name, user, .. } = *attributes;
    let resource = ResourceInfo {
        group: kind.group.clone().into_owned(),
        version: kind.version.clone().into_owned(),
        namespace: namespace.to_owned(),
        resource: kind.plural.clone().into_owned(),
        name: name.to_owned(),
        ..ResourceInfo::default()
    };
    match admission.authorize_also(user, "initialize", resource).await {
        Err(error) if error.code == 403 => {
            Err(ApiError::forbidden_object(kind, name, format!("{why}: {}", error.message)))
        }
        other => other,
    }
}

// === impl Initializer ===

impl Initializer {
    /// Parses an initializer of a validated configuration.
    fn read(initializer: &Value) -> Self {
        let texts = |rule: &Value, field: &str| string_list::texts(&rule[field]).map(str::to_owned).collect();
        let rules = initializer["rules"].as_array().into_iter().flatten().map(|rule| Rule {
            groups: texts(rule, "apiGroups"),
            versions: texts(rule, "apiVersions"),
            resources: texts(rule, "resources"),
        });
        Self { name: initializer["name"].as_str().unwrap_or_default().to_owned(), rules: rules.collect() }
    }

    /// Whether all rules match the resource. An initializer without rules applies to no object.
    fn selects(&self, kind: &Resource) -> bool {
        !self.rules.is_empty() && self.rules.iter().all(|rule| rule.matches(kind))
    }
}

// === impl Rule ===

impl Rule {
    fn matches(&self, kind: &Resource) -> bool {
        let has = |list: &[String], wanted: &str| list.iter().any(|one| one == "*" || one == wanted);
        has(&self.groups, &kind.group)
            && has(&self.versions, &kind.version)
            && has(&self.resources, &kind.plural)
    }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;

    use super::*;

    #[test]
    fn all_rules_of_an_initializer_match() {
        let rule = |groups: &[&str], resources: &[&str]| json!({"apiGroups": groups, "apiVersions": ["v1"], "resources": resources});
        let selects = |rules: Value, api_version: &str, kind: &str| {
            let initializer = Initializer::read(&json!({"name": "a.example.com", "rules": rules}));
            initializer.selects(by_kind(api_version, kind).unwrap())
        };
        assert!(selects(json!([rule(&[""], &["pods"])]), "v1", "Pod"));
        assert!(selects(json!([rule(&["*"], &["*"])]), "apps/v1", "Deployment"));
        assert!(!selects(json!([rule(&[""], &["pods"])]), "apps/v1", "Deployment"));
        // Source: `matchRule`, which returns false at the first rule that does not match.
        let both = json!([rule(&[""], &["pods"]), rule(&[""], &["secrets"])]);
        assert!(!selects(both, "v1", "Pod"));
        assert!(!selects(json!([]), "v1", "Pod"));
    }
}
