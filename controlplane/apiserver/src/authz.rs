//! Authorization: a chain of authorizers (`authz/`). The first verdict other than no opinion decides; the default is
//! deny.

mod abac;
mod component;
mod condition;
mod config;
mod constant;
pub(crate) mod impersonation;
mod masters;
pub(crate) mod node;
pub(crate) mod rbac;
pub(crate) mod selectors;
mod webhook;

use std::borrow::Cow;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use futures::future::{BoxFuture, Either};
use serde_json::{Value, json};

use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    request::{Query, RequestInfo, ResourceInfo},
};
pub use config::AuthorizationConfig;
use rbac::{Policies, rule::Rule};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use webhook::fuzz as fuzz_review;

/// The attributes of a request for authorizers.
pub(crate) struct AccessAttributes<'a> {
    pub(crate) user: &'a User,
    /// The verb to check. Usually the verb of the request.
    pub(crate) verb: &'a str,
    pub(crate) info: &'a RequestInfo,
    pub(crate) cache: &'a Cache,
}

/// The result of one authorizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allow,
    Deny,
    /// The next authorizer decides.
    NoOpinion,
}

/// A verdict, and the reason that the client receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) verdict: Verdict,
    pub(crate) reason: Cow<'static, str>,
}

/// A running decision. A local authorizer decides immediately and without an allocation.
pub(crate) type Deciding<'a> = Either<Ready<Decision>, BoxFuture<'a, Decision>>;

/// A member of the chain.
pub(crate) trait Authorizer: Send + Sync {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a>;

    /// Adds the rules of a user. By default, no rules are added.
    fn add_rules(&self, _of: &RulesScope<'_>, _found: &mut UserRules) {}
}

/// The user and the namespace of a rules review.
pub(crate) struct RulesScope<'a> {
    pub(crate) user: &'a User,
    pub(crate) namespace: &'a str,
    pub(crate) cache: &'a Cache,
}

/// The rules of a user, as far as the authorizers can list them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct UserRules {
    pub(crate) rules: Vec<Rule>,
    /// Names of the authorizers that cannot list their rules.
    pub(crate) unlisted: Vec<&'static str>,
    /// Whether rules are left out because the list is too long.
    pub(crate) is_cut: bool,
}

/// The chain of authorizers.
pub(crate) struct Authorizers {
    /// The RBAC index, built from the watch cache.
    pub(crate) policies: Arc<Policies>,
    /// The authorizers in their order. A change of the configuration file replaces them.
    chain: ArcSwap<Vec<Box<dyn Authorizer>>>,
    config: AuthorizationConfig,
    /// Text of the configuration file that the chain was created from. `None` without a file.
    text: Mutex<Option<String>>,
    allows_all: bool,
}

// === impl Decision ===

impl Decision {
    /// Allows with a reason, or has no opinion.
    fn allow_if(allowed: bool, reason: &'static str) -> Self {
        match allowed {
            true => Self { verdict: Verdict::Allow, reason: reason.into() },
            false => Self { verdict: Verdict::NoOpinion, reason: "".into() },
        }
    }

    fn no_opinion(reason: &'static str) -> Self {
        Self { verdict: Verdict::NoOpinion, reason: reason.into() }
    }

    /// Returns the error for the client unless the decision allows the request.
    pub(crate) fn permit(&self, attributes: &AccessAttributes<'_>) -> Result<()> {
        let message = match (self.verdict, &*self.reason) {
            (Verdict::Allow, _) => return Ok(()),
            (_, "") => refusal(attributes),
            (_, reason) => format!("{}: {reason}", refusal(attributes)),
        };
        Err(ApiError { details: details(attributes.info), ..ApiError::forbidden(message) })
    }

    /// The decision of a local authorizer.
    fn ready<'a>(self) -> Deciding<'a> {
        Either::Left(ready(self))
    }
}

/// The reasons of the authorizers without an opinion.
#[derive(Default)]
struct Undecided(Vec<Cow<'static, str>>);

// === impl Undecided ===

impl Undecided {
    /// Adds the next decision of the chain. Returns this decision if it ends the chain.
    fn add(&mut self, decision: Decision) -> Option<Decision> {
        if decision.verdict != Verdict::NoOpinion {
            return Some(decision);
        }
        if !decision.reason.is_empty() {
            self.0.push(decision.reason);
        }
        None
    }

    /// The decision if no authorizer has an opinion.
    fn decision(self) -> Decision {
        Decision { verdict: Verdict::NoOpinion, reason: self.0.join(", ").into() }
    }
}

// === impl Authorizers ===

impl Authorizers {
    /// Creates the configured authorizers. Reads their files.
    ///
    /// # Errors
    /// A mode is unknown, or a file cannot be used.
    pub(crate) fn new(config: AuthorizationConfig) -> std::result::Result<Self, String> {
        let policies = Arc::<Policies>::default();
        let text = config.read_file()?;
        let members = config.members(text.as_deref(), &policies)?;
        let chain = ArcSwap::from_pointee(members.chain);
        Ok(Self { policies, chain, config, text: Mutex::new(text), allows_all: members.allows_all })
    }

    /// Whether the chain allows every request. The server then refuses anonymous requests.
    pub(crate) fn allows_all(&self) -> bool {
        self.allows_all
    }

    /// Reads the configuration file again. Returns false if its text has not changed: the chain stays, with the cached
    /// decisions of its webhooks. On an error the chain stays too.
    ///
    /// # Errors
    /// The file is invalid, or the new chain allows every request.
    pub(crate) fn reload(&self) -> std::result::Result<bool, String> {
        let text = self.config.read_file()?;
        let mut used = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        if *used == text {
            return Ok(false);
        }
        let members = self.config.members(text.as_deref(), &self.policies)?;
        if members.allows_all && !self.allows_all {
            // The server determines at its start whether it accepts anonymous requests. With a chain that allows
            // everything, the server must refuse them.
            return Err("the authorizer AlwaysAllow cannot be added without a restart".to_owned());
        }
        self.chain.store(Arc::new(members.chain));
        *used = text;
        Ok(true)
    }

    /// The first verdict other than [`Verdict::NoOpinion`]. If there is no such verdict, [`Verdict::NoOpinion`] with
    /// all reasons.
    pub(crate) async fn decide(&self, attributes: &AccessAttributes<'_>) -> Decision {
        let mut undecided = Undecided::default();
        let chain = self.chain.load_full();
        for member in chain.iter() {
            if let Some(decision) = undecided.add(member.authorize(attributes).await) {
                return decision;
            }
        }
        undecided.decision()
    }

    /// The decision, as [`Authorizers::decide`], if no webhook must be called. `None` if the decision needs a webhook.
    pub(crate) fn decide_locally(&self, attributes: &AccessAttributes<'_>) -> Option<Decision> {
        let mut undecided = Undecided::default();
        let chain = self.chain.load_full();
        for member in chain.iter() {
            let Either::Left(ready) = member.authorize(attributes) else { return None };
            if let Some(decision) = undecided.add(ready.into_inner()) {
                return Some(decision);
            }
        }
        Some(undecided.decision())
    }

    /// The rules of a user from all authorizers of the chain.
    pub(crate) fn rules(&self, of: &RulesScope<'_>) -> UserRules {
        let mut found = UserRules::default();
        self.chain.load().iter().for_each(|member| member.add_rules(of, &mut found));
        found
    }

    /// Allows the request, or returns the error for the client. No opinion is a refusal.
    pub(crate) async fn authorize(&self, attributes: &AccessAttributes<'_>) -> Result<()> {
        self.decide(attributes).await.permit(attributes)
    }

    /// Checks that the user has another permission in addition to the permission for the request. Returns the error for
    /// the client.
    pub(crate) async fn authorize_also(
        &self,
        cache: &Cache,
        user: &User,
        verb: &str,
        resource: ResourceInfo,
    ) -> Result<()> {
        let info =
            RequestInfo { verb: "", path: String::new(), query: Query::default(), resource: Some(resource) };
        self.authorize(&AccessAttributes { user, verb, info: &info, cache }).await
    }
}

/// Whether a request opens a stream into a pod. Such a request needs the verb `create` for every HTTP method.
pub(crate) fn enters_pod(info: &RequestInfo) -> bool {
    info.resource.as_ref().is_some_and(|resource| {
        resource.group.is_empty()
            && resource.resource == "pods"
            && matches!(resource.subresource.as_str(), "exec" | "attach" | "portforward")
    })
}

/// The details of a refusal: group, resource and name.
fn details(info: &RequestInfo) -> Value {
    let Some(resource) = &info.resource else { return json!({}) };
    let name = info.object_name();
    let fields = [("name", &*name), ("group", &*resource.group), ("kind", &*resource.resource)];
    let fields = fields.into_iter().filter(|(_, text)| !text.is_empty());
    fields.map(|(field, text)| (field.to_owned(), Value::from(text))).collect()
}

fn refusal(attributes: &AccessAttributes<'_>) -> String {
    let (user, verb, info) = (&attributes.user.name, attributes.verb, attributes.info);
    let Some(resource) = &info.resource else {
        return format!("forbidden: User \"{user}\" cannot {verb} path \"{}\"", info.path);
    };
    let mut what = resource.resource.clone();
    if !resource.subresource.is_empty() {
        what = format!("{what}/{}", resource.subresource);
    }
    let qualified = if resource.group.is_empty() {
        resource.resource.clone()
    } else {
        format!("{}.{}", resource.resource, resource.group)
    };
    let subject =
        if resource.name.is_empty() { qualified } else { format!("{qualified} \"{}\"", resource.name) };
    let scope = if resource.namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", resource.namespace)
    };
    format!(
        "{subject} is forbidden: User \"{user}\" cannot {verb} resource \"{what}\" in API group \"{}\" {scope}",
        resource.group
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Method;

    /// An authorizer that returns one fixed decision, but not at the first poll.
    struct Later(Verdict, &'static str);

    impl Authorizer for Later {
        fn authorize<'a>(&'a self, _: &'a AccessAttributes<'a>) -> Deciding<'a> {
            Either::Right(Box::pin(async {
                tokio::task::yield_now().await;
                Decision { verdict: self.0, reason: self.1.into() }
            }))
        }
    }

    async fn error(chain: Vec<Box<dyn Authorizer>>) -> Option<String> {
        let info = RequestInfo::parse(&Method::GET, &"/api/v1/nodes".parse().unwrap());
        let (user, cache) = (User::new("ann", &[]), Cache::new(0));
        let attributes = AccessAttributes { user: &user, verb: "list", info: &info, cache: &cache };
        let chain = ArcSwap::from_pointee(chain);
        let all = Authorizers {
            policies: Arc::default(),
            chain,
            config: AuthorizationConfig::default(),
            text: Mutex::default(),
            allows_all: false,
        };
        all.authorize(&attributes).await.err().map(|error| error.message)
    }

    #[test]
    fn a_refusal_has_the_details_of_its_object() {
        let of = |uri: &str| details(&RequestInfo::parse(&Method::GET, &uri.parse().unwrap()));
        let expected = json!({"name": "d", "group": "apps", "kind": "deployments"});
        assert_eq!(of("/apis/apps/v1/namespaces/x/deployments/d/scale"), expected);
        assert_eq!(of("/api/v1/pods?fieldSelector=metadata.name%3Dp"), json!({"name": "p", "kind": "pods"}));
        assert_eq!(of("/metrics"), json!({}));
    }

    #[test]
    fn a_refusal_names_the_namespace_of_the_permission() {
        let (user, cache) = (User::new("ann", &[]), Cache::new(0));
        let of = |uri: &str| {
            let info = RequestInfo::parse(&Method::GET, &uri.parse().unwrap());
            refusal(&AccessAttributes { user: &user, verb: info.verb, info: &info, cache: &cache })
        };
        // A role of the namespace can permit requests for the namespace itself.
        assert!(of("/api/v1/namespaces/team").ends_with(" in the namespace \"team\""));
        assert!(of("/api/v1/namespaces/team/pods/p").ends_with(" in the namespace \"team\""));
        assert!(of("/api/v1/namespaces").ends_with(" at the cluster scope"));
        assert!(of("/api/v1/nodes/n").ends_with(" at the cluster scope"));
    }

    #[tokio::test]
    async fn the_first_opinion_decides_and_none_is_a_refusal() {
        let (allow, deny) =
            (|| Box::new(Later(Verdict::Allow, "yes")), || Box::new(Later(Verdict::Deny, "no")));
        let none = || Box::new(Later(Verdict::NoOpinion, "unknown"));
        let refusal = "nodes is forbidden: User \"ann\" cannot list resource \"nodes\" in API group \"\" at the cluster scope";
        assert_eq!(error(vec![none(), allow(), deny()]).await, None);
        assert_eq!(error(vec![none(), deny(), allow()]).await, Some(format!("{refusal}: no")));
        assert_eq!(error(vec![none(), none()]).await, Some(format!("{refusal}: unknown, unknown")));
        assert_eq!(error(Vec::new()).await, Some(refusal.to_owned()));
    }
}
