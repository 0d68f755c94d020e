//! One rule of a role: the requests that it allows, and the rules that it covers.

use std::collections::HashSet;

use coracle_values::{CollectMap, string_list};
use serde_json::{Map, Value, json};

use crate::request::RequestInfo;

/// A rule, as `rbac.authorization.k8s.io/v1` PolicyRule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) verbs: Vec<String>,
    pub(crate) groups: Vec<String>,
    pub(crate) resources: Vec<String>,
    /// `resourceNames`. Empty allows all names. A list of more than [`MANY_NAMES`] names is sorted.
    pub(crate) names: Vec<String>,
    pub(crate) urls: Vec<String>,
}

/// Maximum number of parts of all rules of a role that are compared one by one. A request of a few kilobytes can
/// contain four lists of a thousand words, which have 10¹² parts.
pub(crate) const MAX_PARTS: usize = 20_000;

/// Maximum bytes of the words of all these parts. Each part repeats its words, and a word may have a megabyte.
const MAX_BYTES: usize = 16 << 20;

/// Maximum comparisons between the words of wanted rules and the words of the rules that the user holds. A tenant can
/// hold roles with millions of words in its namespace.
const MAX_COMPARISONS: usize = 100_000_000;

/// A rule with more names sorts them, so that a binary search finds a name.
const MANY_NAMES: usize = 100;

/// The rules have more than [`MAX_PARTS`] parts, or [`MAX_BYTES`] bytes, or need more than [`MAX_COMPARISONS`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyParts;

/// The fields of a rule in JSON.
const FIELDS: [&str; 5] = ["verbs", "apiGroups", "resources", "resourceNames", "nonResourceURLs"];

fn has(list: &[String], word: &str) -> bool {
    list.iter().any(|one| one == word)
}

impl Rule {
    /// Two rules that together allow every request.
    pub(crate) fn all() -> [Self; 2] {
        let any = || vec!["*".to_owned()];
        [
            Self { verbs: any(), groups: any(), resources: any(), ..Self::default() },
            Self { verbs: any(), urls: any(), ..Self::default() },
        ]
    }

    /// The rules of a role.
    pub(crate) fn list(role: &Value) -> Vec<Self> {
        role["rules"].as_array().into_iter().flatten().map(Self::read).collect()
    }

    fn read(rule: &Value) -> Self {
        let [verbs, groups, resources, names, urls] =
            FIELDS.map(|field| string_list::texts(&rule[field]).map(str::to_owned).collect());
        let mut names: Vec<String> = names;
        if names.len() > MANY_NAMES {
            names.sort_unstable();
        }
        Self { verbs, groups, resources, names, urls }
    }

    /// The rule as JSON, without empty fields.
    pub(crate) fn json(&self) -> Value {
        let lists = [&self.verbs, &self.groups, &self.resources, &self.names, &self.urls];
        let fields = FIELDS.into_iter().zip(lists).filter(|(_, list)| !list.is_empty());
        fields.map(|(field, list)| (field.to_owned(), json!(list))).collect_map::<Map<_, _>>().into()
    }

    /// Whether the rule allows a request. `name` is the request's [`RequestInfo::object_name`], which is parsed once
    /// for all rules.
    pub(crate) fn allows(&self, verb: &str, info: &RequestInfo, name: &str) -> bool {
        let any = |list: &[String], word: &str| has(list, word) || has(list, "*");
        if !any(&self.verbs, verb) {
            return false;
        }
        let Some(resource) = &info.resource else { return self.has_url(&info.path) };
        any(&self.groups, &resource.group)
            && self.has_resource(&resource.resource, &resource.subresource)
            && (self.names.is_empty() || self.has_name(name))
    }

    fn has_name(&self, name: &str) -> bool {
        if self.names.len() > MANY_NAMES {
            return self.names.binary_search_by(|one| one.as_str().cmp(name)).is_ok();
        }
        has(&self.names, name)
    }

    fn has_resource(&self, resource: &str, sub: &str) -> bool {
        self.resources.iter().any(|one| match (one.as_str(), one.split_once('/')) {
            ("*", _) => true,
            (one, None) => sub.is_empty() && one == resource,
            (_, Some((of, own))) => !sub.is_empty() && own == sub && (of == "*" || of == resource),
        })
    }

    fn has_url(&self, path: &str) -> bool {
        self.urls.iter().any(|url| match url.strip_suffix('*') {
            Some(start) => path.starts_with(start),
            None => url == path,
        })
    }

    /// The rule without duplicate words.
    fn without_repeats(&self) -> Self {
        let once = |list: &[String]| {
            let mut found = HashSet::new();
            list.iter().filter(|word| found.insert(*word)).cloned().collect()
        };
        Self {
            verbs: once(&self.verbs),
            groups: once(&self.groups),
            resources: once(&self.resources),
            names: once(&self.names),
            urls: once(&self.urls),
        }
    }

    /// Whether the comparison of the rule with other rules may take long.
    pub(super) fn is_long(&self) -> bool {
        let lists = [&self.verbs, &self.groups, &self.resources, &self.names, &self.urls];
        lists.iter().any(|list| list.len() > 100) || self.part_count() > 1000
    }

    /// Approximate bytes of the rule in memory.
    pub(super) fn bytes(&self) -> usize {
        let lists = [&self.verbs, &self.groups, &self.resources, &self.names, &self.urls];
        let words = lists.into_iter().flatten().map(|word| word.len() + size_of::<String>());
        size_of::<Self>() + words.sum::<usize>()
    }

    /// Number of parts that [`Rule::parts`] returns.
    fn part_count(&self) -> usize {
        let lists = [self.groups.len(), self.resources.len(), self.names.len().max(1)];
        let objects = lists.into_iter().fold(1, usize::saturating_mul);
        self.verbs.len().saturating_mul(self.urls.len().saturating_add(objects))
    }

    /// Upper bound of the bytes of the parts.
    fn part_bytes(&self) -> usize {
        let lists = [&self.verbs, &self.groups, &self.resources, &self.names, &self.urls];
        let longest = lists.map(|list| list.iter().map(String::len).max().unwrap_or_default());
        self.part_count().saturating_mul(longest.iter().sum())
    }

    /// Splits the rule into parts with one verb, group, resource, name or URL each.
    fn parts(&self) -> Vec<Self> {
        let one = |word: &String| vec![word.clone()];
        let mut parts = Vec::new();
        for verb in &self.verbs {
            for url in &self.urls {
                parts.push(Self { verbs: one(verb), urls: one(url), ..Self::default() });
            }
            for (group, resource) in
                self.groups.iter().flat_map(|group| self.resources.iter().map(move |one| (group, one)))
            {
                let part = Self {
                    verbs: one(verb),
                    groups: one(group),
                    resources: one(resource),
                    ..Self::default()
                };
                match self.names.as_slice() {
                    [] => parts.push(part),
                    names => parts.extend(names.iter().map(|name| Self { names: one(name), ..part.clone() })),
                }
            }
        }
        parts
    }

    /// Upper bound of the comparisons of words in [`Rule::covers`].
    fn comparisons(&self, part: &Self) -> usize {
        let lists = [
            (&self.verbs, &part.verbs),
            (&self.groups, &part.groups),
            (&self.resources, &part.resources),
            (&self.urls, &part.urls),
        ];
        let products = lists.map(|(own, asked)| own.len().saturating_mul(asked.len()));
        products.into_iter().fold(part.names.len().saturating_add(1), usize::saturating_add)
    }

    /// Whether the rule covers a rule for resources or for URLs. In resource names `*` is not a wildcard.
    fn covers(&self, part: &Self) -> bool {
        let each = |own: &[String], asked: &[String]| asked.iter().all(|word| has(own, word));
        let all = |own: &[String], asked: &[String]| has(own, "*") || each(own, asked);
        if !all(&self.verbs, &part.verbs) {
            return false;
        }
        if !part.urls.is_empty() {
            return part.urls.iter().all(|url| has(&self.urls, url) || self.has_url(url));
        }
        let resource = |asked: &String| {
            let (of, sub) = asked.split_once('/').unwrap_or((asked, ""));
            has(&self.resources, asked) || self.has_resource(of, sub)
        };
        let named = self.names.is_empty()
            || (!part.names.is_empty() && part.names.iter().all(|name| self.has_name(name)));
        all(&self.groups, &part.groups) && part.resources.iter().all(resource) && named
    }
}

/// The parts of the wanted rules that the held rules do not cover.
///
/// # Errors
/// There are too many parts or words to compare. The parts of a wanted rule that a single held rule covers are not
/// counted.
pub(crate) fn missing<'a>(
    held: impl Iterator<Item = &'a Rule> + Clone,
    wanted: &[Rule],
) -> Result<Vec<Rule>, TooManyParts> {
    let is_one_kind = |rule: &Rule| rule.urls.is_empty() || rule.resources.is_empty();
    let mut left = MAX_COMPARISONS;
    let mut is_covered = |rule: &Rule| -> Result<bool, TooManyParts> {
        for own in held.clone() {
            left = left.checked_sub(own.comparisons(rule)).ok_or(TooManyParts)?;
            if own.covers(rule) {
                return Ok(true);
            }
        }
        Ok(false)
    };
    let mut open: Vec<Rule> = Vec::new();
    for rule in wanted.iter().map(Rule::without_repeats) {
        if !is_one_kind(&rule) || !is_covered(&rule)? {
            open.push(rule);
        }
    }
    let sum = |of: fn(&Rule) -> usize| open.iter().map(of).fold(0, usize::saturating_add);
    if sum(Rule::part_count) > MAX_PARTS || sum(Rule::part_bytes) > MAX_BYTES {
        return Err(TooManyParts);
    }
    let mut missing = Vec::new();
    for part in open.iter().flat_map(Rule::parts) {
        if !is_covered(&part)? {
            missing.push(part);
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Method;

    fn rule(value: Value) -> Rule {
        Rule::read(&value)
    }

    fn allows(rule: &Rule, method: Method, uri: &str) -> bool {
        let info = RequestInfo::parse(&method, &uri.parse().unwrap());
        rule.allows(info.verb, &info, &info.object_name())
    }

    #[test]
    fn a_rule_allows_what_it_names() {
        let pods =
            rule(json!({"verbs": ["get", "list"], "apiGroups": [""], "resources": ["pods", "*/status"]}));
        assert!(allows(&pods, Method::GET, "/api/v1/namespaces/a/pods/p"));
        assert!(allows(&pods, Method::GET, "/api/v1/pods"));
        assert!(allows(&pods, Method::GET, "/api/v1/nodes/n/status"));
        for (method, uri) in [
            (Method::GET, "/api/v1/namespaces/a/pods/p/log"),
            (Method::GET, "/api/v1/nodes/n"),
            (Method::DELETE, "/api/v1/namespaces/a/pods/p"),
            (Method::GET, "/apis/apps/v1/namespaces/a/pods/p"),
            (Method::GET, "/healthz"),
        ] {
            assert!(!allows(&pods, method, uri), "{uri}");
        }
        let [everything, everywhere] = Rule::all();
        assert!(allows(&everything, Method::POST, "/api/v1/namespaces/a/pods/p/exec"));
        assert!(
            allows(&everywhere, Method::GET, "/metrics") && !allows(&everything, Method::GET, "/metrics")
        );
    }

    #[test]
    fn names_and_urls_restrict_a_rule() {
        let one =
            json!({"verbs": ["*"], "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["c"]});
        let one = rule(one);
        assert!(allows(&one, Method::GET, "/api/v1/namespaces/a/configmaps/c"));
        assert!(allows(
            &one,
            Method::GET,
            "/api/v1/namespaces/a/configmaps?fieldSelector=metadata.name%3Dc&watch=1"
        ));
        assert!(!allows(&one, Method::GET, "/api/v1/namespaces/a/configmaps"));
        assert!(!allows(&one, Method::POST, "/api/v1/namespaces/a/configmaps"));
        assert!(!allows(&one, Method::GET, "/api/v1/namespaces/a/configmaps/d"));
        for (selector, expect) in [
            ("metadata.name%3D%3Dc", true),
            ("metadata.namespace%3Da,metadata.name%3Dc", true),
            ("metadata.name!%3Dc", false),
            // The comma belongs to the value of the first requirement. All objects meet that requirement.
            ("metadata.namespace!%3Dx%5C,metadata.name%3Dc", false),
        ] {
            let path = format!("/api/v1/namespaces/a/configmaps?fieldSelector={selector}");
            assert_eq!(allows(&one, Method::GET, &path), expect, "{selector}");
        }
        let urls = rule(json!({"verbs": ["get"], "nonResourceURLs": ["/healthz", "/api/*"]}));
        assert!(allows(&urls, Method::GET, "/healthz") && allows(&urls, Method::GET, "/api/v1"));
        assert!(!allows(&urls, Method::GET, "/healthz/x") && !allows(&urls, Method::GET, "/apis"));
    }

    #[test]
    fn rules_that_are_not_held_are_found() {
        let held = [
            rule(
                json!({"verbs": ["get", "list"], "apiGroups": ["", "apps"], "resources": ["pods", "*/scale"]}),
            ),
            rule(
                json!({"verbs": ["*"], "apiGroups": ["x"], "resources": ["*"], "resourceNames": ["a", "b"]}),
            ),
            rule(json!({"verbs": ["get"], "nonResourceURLs": ["/a/*"]})),
        ];
        let missing = |value: Value| missing(held.iter(), &[rule(value)]).unwrap().len();
        assert_eq!(missing(json!({"verbs": ["get"], "apiGroups": ["", "apps"], "resources": ["pods"]})), 0);
        assert_eq!(missing(json!({"verbs": ["get"], "apiGroups": ["apps"], "resources": ["d/scale"]})), 0);
        assert_eq!(missing(json!({"verbs": ["get", "delete"], "apiGroups": [""], "resources": ["pods"]})), 1);
        assert_eq!(missing(json!({"verbs": ["*"], "apiGroups": [""], "resources": ["pods"]})), 1);
        assert_eq!(missing(json!({"verbs": ["x"], "apiGroups": ["x"], "resources": ["y"]})), 1);
        let named = |names: Value| json!({"verbs": ["x"], "apiGroups": ["x"], "resources": ["y"], "resourceNames": names});
        assert_eq!(missing(named(json!(["a", "c"]))), 1);
        assert_eq!(missing(json!({"verbs": ["get"], "nonResourceURLs": ["/a/b", "/a/*"]})), 0);
        assert_eq!(missing(json!({"verbs": ["get"], "nonResourceURLs": ["/b", "*"]})), 2);
        assert_eq!(missing(Rule::all()[0].json()), 1);
    }

    #[test]
    fn the_name_of_an_object_is_not_a_wildcard() {
        let named = |name: &str| {
            rule(
                json!({"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"], "resourceNames": [name]}),
            )
        };
        assert_eq!(missing([named("*")].iter(), &[named("db")]), Ok(vec![named("db")]));
        assert_eq!(missing([named("*")].iter(), &[named("*")]), Ok(Vec::new()));
    }

    #[test]
    fn the_parts_of_a_role_are_limited() {
        let words = |count: usize| (0..count).map(|number| number.to_string()).collect::<Vec<_>>();
        let large = rule(json!({"verbs": words(1000), "apiGroups": words(1000), "resources": words(1000),
            "resourceNames": words(1000)}));
        let many = vec![rule(json!({"verbs": words(10), "nonResourceURLs": words(1000)})); 3];
        for wanted in [&[large.clone()][..], &many] {
            assert_eq!(missing([].iter(), wanted), Err(TooManyParts));
            assert_eq!(missing(Rule::all().iter(), wanted), Ok(Vec::new()), "one rule covers each of them");
        }
        let long = json!({"verbs": ["x".repeat(1 << 20)], "apiGroups": [""], "resources": words(1000)});
        assert_eq!(missing([].iter(), &[rule(long)]), Err(TooManyParts));
        let repeated =
            rule(json!({"verbs": vec!["get"; 1000], "apiGroups": vec![""; 1000], "resources": ["pods"]}));
        assert_eq!(missing([].iter(), &[repeated]).unwrap().len(), 1);
        // No single rule covers both resources and URLs, so the rule is compared part by part.
        let both = rule(
            json!({"verbs": ["get"], "apiGroups": [""], "resources": ["pods"], "nonResourceURLs": ["/a"]}),
        );
        assert_eq!(missing(Rule::all()[1..].iter(), &[both]).unwrap().len(), 1);
    }

    #[test]
    fn many_names_are_found_in_any_order() {
        let names = |from: usize, to: usize| (from..to).rev().map(|n| n.to_string()).collect::<Vec<_>>();
        let named = |names: Vec<String>| {
            rule(
                json!({"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"], "resourceNames": names}),
            )
        };
        let many = named(names(0, 1000));
        for (name, expect) in [("0", true), ("999", true), ("1000", false), ("", false)] {
            let uri = format!("/api/v1/namespaces/a/secrets/{name}");
            assert_eq!(allows(&many, Method::GET, &uri), expect, "{name}");
        }
        assert_eq!(missing([many.clone()].iter(), &[named(names(5, 500))]), Ok(Vec::new()));
        let above = missing([many].iter(), &[named(names(900, 1002))]).unwrap();
        let mut above: Vec<_> = above.into_iter().flat_map(|rule| rule.names).collect();
        above.sort();
        assert_eq!(above, ["1000", "1001"]);
    }

    #[test]
    fn the_comparisons_with_the_rules_of_a_user_are_limited() {
        let words = |count: usize| (0..count).map(|number| number.to_string()).collect::<Vec<_>>();
        let of = |resources: Vec<String>, names: Vec<String>| {
            rule(json!({"verbs": ["get"], "apiGroups": [""], "resources": resources, "resourceNames": names}))
        };
        let resources = of([words(20_000), vec!["x".to_owned()]].concat(), Vec::new());
        assert_eq!(missing([of(words(20_000), Vec::new())].iter(), &[resources]), Err(TooManyParts));
        // A rule with very many names needs few comparisons for each name.
        let names = of(vec!["pods".to_owned()], [words(15_000), vec!["x".to_owned()]].concat());
        let held = vec![of(vec!["pods".to_owned()], words(15_000)); 20];
        assert_eq!(missing(held.iter(), &[names]).unwrap().len(), 1);
    }
}
