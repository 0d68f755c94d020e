//! Credential provider plugins of the kubelet: programs that return registry credentials.
//!
//! A `CredentialProviderConfig` (kubelet.config.k8s.io) maps images to programs. A program reads a
//! `CredentialProviderRequest` on standard input and writes a `CredentialProviderResponse`, which is cached for the
//! time that the response names. Without a response the pull continues without these credentials.

mod call;
mod config;
mod flights;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use coracle_images::Reference;
use coracle_proto::cri::AuthConfig;
use futures::future::join_all;
use nix::unistd::{AccessFlags, access};

use self::config::{Config, Entries, Settings};
use self::flights::Flights;
use super::secret::{location, matched};
use crate::bounded;
use crate::duration;
pub use config::ProviderError;

const CONFIG_VERSIONS: [&str; 3] =
    ["kubelet.config.k8s.io/v1", "kubelet.config.k8s.io/v1beta1", "kubelet.config.k8s.io/v1alpha1"];
const PROTOCOL_VERSIONS: [&str; 3] = [
    "credentialprovider.kubelet.k8s.io/v1",
    "credentialprovider.kubelet.k8s.io/v1beta1",
    "credentialprovider.kubelet.k8s.io/v1alpha1",
];

/// Capacity of the cache of a provider.
const CACHE_MAX: usize = 1024;
/// Maximum time in the cache. Some programs return durations that overflow a clock.
const MAX_CACHE_TIME: Duration = Duration::from_secs(366 * 24 * 3600);

/// The node's credential providers.
#[derive(Default)]
pub(crate) struct Providers(Vec<Provider>);

struct Provider {
    settings: Settings,
    program: PathBuf,
    default_cache: Duration,
    kept: Mutex<HashMap<Key, CachedCredentials>>,
    /// Running calls: a second caller waits for the result of the first.
    flights: Flights<Key, CallResult>,
    /// The key type of the last response. Concurrent pulls whose images have the same key share one call, for example
    /// after a boot.
    last_key_type: Mutex<call::KeyType>,
}

/// Result of a call, and the image of its request.
struct CallResult {
    image: String,
    answer: Result<call::Answer, call::CallError>,
}

/// Cache key of a response.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Image(String),
    Registry(String),
    Global,
}

/// Maximum size of the configuration in bytes.
const CONFIG_MAX: u64 = 1 << 20;

struct CachedCredentials {
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
                return Err(wrong("the provider is configured twice".to_owned()));
            }
            providers.push(Provider::new(settings, programs).map_err(wrong)?);
        }
        Ok(Providers(providers))
    }

    /// Credentials for an image from all providers that match it, with the length of the match.
    pub(super) async fn credentials(&self, reference: &Reference) -> Vec<(usize, AuthConfig)> {
        let image = reference.repository();
        let serving: Vec<&Provider> = self.0.iter().filter(|provider| provider.serves(reference)).collect();
        let answers = join_all(serving.iter().map(|provider| provider.entries(&image))).await;
        answers.into_iter().flatten().flat_map(|entries| matched(entries, reference)).collect()
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
            return Err("the name must be the file name of a program, without spaces".to_owned());
        }
        if settings.match_images.is_empty() {
            return Err("matchImages is empty".to_owned());
        }
        if !PROTOCOL_VERSIONS.contains(&settings.api_version.as_str()) {
            return Err(format!("apiVersion {:?} is not supported", settings.api_version));
        }
        if settings.token_attributes.is_some() {
            return Err(
                "tokenAttributes are not supported: providers get no service account tokens".to_owned()
            );
        }
        let written = settings.default_cache_duration.as_deref().ok_or("defaultCacheDuration is missing")?;
        let default_cache = duration::parse(written)
            .ok_or_else(|| format!("defaultCacheDuration {written:?} is not a duration"))?;
        let program = programs.join(name);
        access(&program, AccessFlags::X_OK)
            .map_err(|error| format!("{} cannot be executed: {error}", program.display()))?;
        let (kept, last_key_type) = (Mutex::default(), Mutex::new(call::KeyType::Image));
        Ok(Provider { settings, program, default_cache, kept, flights: Flights::default(), last_key_type })
    }

    fn serves(&self, reference: &Reference) -> bool {
        let patterns = self.settings.match_images.iter();
        patterns
            .map(|p| location(p))
            .any(|p| super::secret::applies(&p, reference.domain(), reference.path()))
    }

    /// The program's credentials for an image, cached or from a call. None if the call fails.
    async fn entries(&self, image: &str) -> Option<Entries> {
        if let Some(entries) = self.cached(image, Instant::now()) {
            return Some(entries);
        }
        let last_key_type = *self.last_key_type.lock().unwrap_or_else(PoisonError::into_inner);
        let mut result = self.flights.join(Key::of(last_key_type, image), || self.ask(image)).await;
        if !result.is_for(image) {
            // The result is for another image, because the key type has changed.
            result = self.flights.join(Key::of(call::KeyType::Image, image), || self.ask(image)).await;
        }
        result.answer.as_ref().ok().map(|answer| answer.entries.clone())
    }

    /// Runs the program and caches its response.
    async fn ask(&self, image: &str) -> CallResult {
        let answer = call::call(&self.settings, &self.program, image).await;
        match &answer {
            Ok(answer) => {
                *self.last_key_type.lock().unwrap_or_else(PoisonError::into_inner) = answer.key;
                let lasts = answer.cache.unwrap_or(self.default_cache).min(MAX_CACHE_TIME);
                if !lasts.is_zero() {
                    let kept =
                        CachedCredentials { until: Instant::now() + lasts, entries: answer.entries.clone() };
                    let mut all = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
                    keep(&mut all, Key::of(answer.key, image), kept);
                }
            }
            Err(error) => {
                tracing::warn!(provider = self.settings.name, image, %error, "cannot get credentials from a provider");
            }
        }
        CallResult { image: image.to_owned(), answer }
    }

    fn cached(&self, image: &str, now: Instant) -> Option<Entries> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|_, kept| kept.until > now);
        let types = [call::KeyType::Image, call::KeyType::Registry, call::KeyType::Global];
        types
            .into_iter()
            .find_map(|good_for| kept.get(&Key::of(good_for, image)))
            .map(|kept| kept.entries.clone())
    }
}

/// Adds credentials to the cache. A full cache is emptied, because tenants can fill it with names of images.
fn keep(all: &mut HashMap<Key, CachedCredentials>, key: Key, kept: CachedCredentials) {
    if all.len() >= CACHE_MAX && !all.contains_key(&key) {
        all.clear();
    }
    all.insert(key, kept);
}

// === impl CallResult ===

impl CallResult {
    /// Whether the result is valid for this image.
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
