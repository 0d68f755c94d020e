//! AES-GCM with a random nonce in front of the ciphertext.

use aes_gcm::{
    AesGcm,
    aead::{Aead as _, KeyInit as _, Payload, consts::U12},
};
use ring::{
    aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey},
    rand::{SecureRandom as _, SystemRandom},
};

use coracle_sealing::Error;

/// AES-GCM with keys of 24 bytes. The crate ring does not support this key length.
pub(super) type Aes192Gcm = AesGcm<aes::Aes192, U12>;

/// A key of 24 bytes.
pub(super) fn key_192(bytes: &[u8]) -> Option<Aes192Gcm> {
    Aes192Gcm::new_from_slice(bytes).ok()
}

/// Encrypts like [`seal`], with a key of 24 bytes.
pub(super) fn seal_192(key: &Aes192Gcm, plain: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
    let nonce: [u8; NONCE_LEN] = random()?;
    let text = key.encrypt(&nonce.into(), Payload { msg: plain, aad: context });
    let mut sealed = nonce.to_vec();
    sealed.extend(text.map_err(|_failed| Error::Cipher)?);
    Ok(sealed)
}

/// Decrypts like [`open`], with a key of 24 bytes.
pub(super) fn open_192(key: &Aes192Gcm, sealed: &[u8], context: &[u8]) -> Option<Vec<u8>> {
    let (nonce, text) = sealed.split_first_chunk::<NONCE_LEN>()?;
    key.decrypt(&(*nonce).into(), Payload { msg: text, aad: context }).ok()
}

/// A key of AES-GCM with 16 or 32 bytes.
pub(super) fn key(bytes: &[u8]) -> Option<LessSafeKey> {
    let algorithm = if bytes.len() == 16 { &AES_128_GCM } else { &AES_256_GCM };
    UnboundKey::new(algorithm, bytes).ok().map(LessSafeKey::new)
}

/// Encrypts. Returns a random nonce, the ciphertext and its tag.
pub(super) fn seal(key: &LessSafeKey, plain: &[u8], context: &[u8]) -> Result<Vec<u8>, Error> {
    let nonce: [u8; NONCE_LEN] = random()?;
    let mut text = plain.to_vec();
    let sealed =
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(context), &mut text);
    sealed.map_err(|_unspecified| Error::Cipher)?;
    let mut sealed = nonce.to_vec();
    sealed.append(&mut text);
    Ok(sealed)
}

/// Decrypts. `None` if the key or the context is not the same as at the encryption, or if the bytes were changed.
pub(super) fn open(key: &LessSafeKey, sealed: &[u8], context: &[u8]) -> Option<Vec<u8>> {
    let (nonce, text) = sealed.split_first_chunk::<NONCE_LEN>()?;
    let mut text = text.to_vec();
    let plain =
        key.open_in_place(Nonce::assume_unique_for_key(*nonce), Aad::from(context), &mut text).ok()?;
    let length = plain.len();
    text.truncate(length);
    Some(text)
}

/// Random bytes from the kernel.
pub(super) fn random<const LENGTH: usize>() -> Result<[u8; LENGTH], Error> {
    let mut bytes = [0; LENGTH];
    SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| Error::Cipher)?;
    Ok(bytes)
}
