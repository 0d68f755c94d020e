//! Credentials from programs of the node's owner: the kubelet's credential provider plugins.
//!
//! A `CredentialProviderConfig` (kubelet.config.k8s.io) says which program serves which images. The program gets a
//! `CredentialProviderRequest` on standard input and answers with a `CredentialProviderResponse`, which is kept for
//! as long as it says. A program that fails costs the pull nothing but its credentials.

mod call;
mod flights;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use coracle_images::Reference;
use coracle_proto::cri::AuthConfig;
use futures::future::join_all;
use nix::unistd::{AccessFlags, access};
use serde::Deserialize;

use self::flights::Flights;
use super::secret::{Entry, location, matched};
use crate::bounded;
use crate::duration;

const CONFIG_VERSIONS: [&str; 3] =
    ["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"];
const PROTOCOL_VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
];

/// A program may say "for ever" in many ways, some of them beyond what a clock can count to.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// Why the configuration of credential providers cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is no configuration of credential providers.
    #[error("cannot understand {}", path.display())]
    Parse {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_yaml_ng::Error,
    },
    /// A provider is configured wrongly.
    #[error("credential provider {name:?}: {what}")]
    Provider {
        /// Which.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// The file is of another kind or version.
    #[error("{} is not a CredentialProviderConfig of kubelet.config.k8s.io/v1, v1beta1 or v1alpha1", path.display())]
    Kind {
        /// Which.
        path: PathBuf,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Config {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    providers: Vec<Settings>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Settings {
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    default_cache_duration: Option<String>,
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<Variable>,
    token_attributes: Option<serde_yaml_ng::Value>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Variable {
    name: String,
    #[serde(default)]
    value: String,
}

/// The node's credential providers.
#[derive(Default)]
pub(crate) struct Providers(Vec<Provider>);

struct Provider {
    settings: Settings,
    program: PathBuf,
    default_cache: Duration,
    kept: Mutex<HashMap<Key, Kept>>,
    /// Calls under way: who comes second is given what the first gets.
    flights: Flights<Key, Told>,
    /// What the last answer was good for, since nobody says so in advance. Pulls that begin together, as those of a node
    /// that was booted, cost one call by it where one is enough.
    usual: Mutex<call::KeyType>,
}

/// What a call gave, and for which image it was made.
struct Told {
    image: String,
    answer: Result<call::Answer, call::CallError>,
}

/// What an answer is good for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Image(String),
    Registry(String),
    Global,
}

type Entries = BTreeMap<String, Entry>;

/// Maximum size of the configuration in bytes.
const CONFIG_MAX: u64 = 1 << 20;

struct Kept {
    until: Instant,
    entries: Entries,
}

// === impl Providers ===

impl Providers {
    /// Reads the configuration and finds its programs.
    pub(crate) fn load(file: &Path, programs: &Path) -> Result<Providers, ProviderError> {
        let text = bounded::read_text(file, CONFIG_MAX)
            .map_err(|source| ProviderError::Read { path: file.to_owned(), source })?;
        let config: Config = serde_yaml_ng::from_str(&text)
            .map_err(|source| ProviderError::Parse { path: file.to_owned(), source })?;
        if config.kind != "CredentialProviderConfig"
            || !CONFIG_VERSIONS.contains(&config.api_version.as_str())
        {
            return Err(ProviderError::Kind { path: file.to_owned() });
        }
        let mut names = HashSet::new();
        let mut providers = Vec::new();
        for settings in config.providers {
            let name = settings.name.clone();
            let wrong = |what: String| ProviderError::Provider { name: name.clone(), what };
            if !names.insert(name.clone()) {
                return Err(wrong("is there twice".to_owned()));
            }
            providers.push(Provider::new(settings, programs).map_err(wrong)?);
        }
        Ok(Providers(providers))
    }

    /// Credentials for an image from all providers that serve it, with the length of what matched.
    pub(super) async fn credentials(&self, reference: &Reference) -> Vec<(usize, AuthConfig)> {
        let image = reference.repository();
        let serving: Vec<&Provider> = self.0.iter().filter(|provider| provider.serves(reference)).collect();
        let asked = join_all(serving.iter().map(|provider| provider.entries(&image))).await;
        asked.into_iter().flatten().flat_map(|entries| matched(entries, reference)).collect()
    }
}

impl std::fmt::Debug for Providers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|provider| &provider.settings.name)).finish()
    }
}

// === impl Provider ===

impl Provider {
    fn new(settings: Settings, programs: &Path) -> Result<Provider, String> {
        let name = &settings.name;
        if name.is_empty()
            || name == "."
            || name == ".."
            || name.contains(|c: char| c == '/' || c.is_whitespace())
        {
            return Err("the name must be that of a program".to_owned());
        }
        if settings.match_images.is_empty() {
            return Err("matchImages is empty".to_owned());
        }
        if !PROTOCOL_VERSIONS.contains(&settings.api_version.as_str()) {
            return Err(format!("apiVersion {:?} is not served", settings.api_version));
        }
        if settings.token_attributes.is_some() {
            return Err("tokenAttributes are not served: providers get no service account tokens".to_owned());
        }
        let written = settings.default_cache_duration.as_deref().ok_or("defaultCacheDuration is missing")?;
        let default_cache = duration::parse(written)
            .ok_or_else(|| format!("defaultCacheDuration {written:?} is no duration"))?;
        let program = programs.join(name);
        access(&program, AccessFlags::X_OK)
            .map_err(|error| format!("{} cannot be executed: {error}", program.display()))?;
        let (kept, usual) = (Mutex::default(), Mutex::new(call::KeyType::Image));
        Ok(Provider { settings, program, default_cache, kept, flights: Flights::default(), usual })
    }

    fn serves(&self, reference: &Reference) -> bool {
        let patterns = self.settings.match_images.iter();
        patterns
            .map(|p| location(p))
            .any(|p| super::secret::applies(&p, reference.domain(), reference.path()))
    }

    /// What the program says for an image, asked now or not long ago; none when it fails.
    async fn entries(&self, image: &str) -> Option<Entries> {
        if let Some(entries) = self.kept(image, Instant::now()) {
            return Some(entries);
        }
        let usual = *self.usual.lock().unwrap_or_else(PoisonError::into_inner);
        let mut told = self.flights.join(Key::of(usual, image), || self.ask(image)).await;
        if !told.is_for(image) {
            // Of another image, by a program that answered otherwise than it did before.
            told = self.flights.join(Key::of(call::KeyType::Image, image), || self.ask(image)).await;
        }
        told.answer.as_ref().ok().map(|answer| answer.entries.clone())
    }

    /// Runs the program and keeps what it says.
    async fn ask(&self, image: &str) -> Told {
        let answer = call::call(&self.settings, &self.program, image).await;
        match &answer {
            Ok(answer) => {
                *self.usual.lock().unwrap_or_else(PoisonError::into_inner) = answer.key;
                let lasts = answer.cache.unwrap_or(self.default_cache).min(LONGEST);
                if !lasts.is_zero() {
                    let kept = Kept { until: Instant::now() + lasts, entries: answer.entries.clone() };
                    let mut all = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
                    all.insert(Key::of(answer.key, image), kept);
                }
            }
            Err(error) => {
                tracing::warn!(provider = self.settings.name, image, %error, "no credentials from a provider");
            }
        }
        Told { image: image.to_owned(), answer }
    }

    fn kept(&self, image: &str, now: Instant) -> Option<Entries> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|_, kept| kept.until > now);
        let types = [call::KeyType::Image, call::KeyType::Registry, call::KeyType::Global];
        types
            .into_iter()
            .find_map(|good_for| kept.get(&Key::of(good_for, image)))
            .map(|kept| kept.entries.clone())
    }
}

// === impl Told ===

impl Told {
    /// Whether it is an answer to the question for this image too.
    fn is_for(&self, image: &str) -> bool {
        let good_for = self.answer.as_ref().map_or(call::KeyType::Image, |answer| answer.key);
        Key::of(good_for, &self.image) == Key::of(good_for, image)
    }
}

// === impl Key ===

impl Key {
    fn of(good_for: call::KeyType, image: &str) -> Key {
        match good_for {
            call::KeyType::Image => Key::Image(image.to_owned()),
            call::KeyType::Registry => Key::Registry(registry(image).to_owned()),
            call::KeyType::Global => Key::Global,
        }
    }
}

fn registry(image: &str) -> &str {
    image.split('/').next().unwrap_or(image)
}

#[cfg(test)]
mod tests;
