//! Small texts on their way.

use std::mem::ManuallyDrop;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::raw::{Comm, Request, Span};
use crate::{Error, Result};

/// A text that is being sent or received, written as JSON. If it is given up before it is done, its memory leaks: the
/// library may still use it.
#[derive(Debug)]
pub(super) struct Letter {
    request: Request,
    text: ManuallyDrop<Vec<u8>>,
}

impl Letter {
    pub(super) fn send(comm: Comm, text: Vec<u8>, to: usize, tag: i32) -> Result<Self> {
        let mut text = ManuallyDrop::new(text);
        // SAFETY: the text lives until the request is done, or for ever.
        let request = unsafe { comm.send(&Span::of_bytes(&mut text), to, tag)? };
        Ok(Letter { request, text })
    }

    /// Receives a text of `most` bytes at the most, from one member or from anybody.
    pub(super) fn receive(comm: Comm, most: usize, from: Option<usize>, tag: i32) -> Result<Self> {
        let mut text = ManuallyDrop::new(vec![0; most]);
        // SAFETY: the text lives until the request is done, or for ever, and nobody reads it before.
        let request = unsafe { comm.receive_up_to(&Span::of_bytes(&mut text), from, tag)? };
        Ok(Letter { request, text })
    }

    /// Whether it has come, or been taken.
    pub(super) fn test(&mut self) -> Result<bool> {
        self.request.test()
    }

    pub(super) fn is_done(&self) -> bool {
        self.request.is_done()
    }

    /// What a letter says that has come.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T> {
        if !self.is_done() {
            return Err(Error::argument("mpi", "a letter was read before it came"));
        }
        read(&self.text)
    }
}

impl Drop for Letter {
    fn drop(&mut self) {
        if self.is_done() {
            // SAFETY: it is not used after this, and the library has done with it.
            unsafe { ManuallyDrop::drop(&mut self.text) };
        }
    }
}

/// A text for a letter of `most` bytes at the most.
pub(super) fn write<T: Serialize>(content: &T, most: usize) -> Result<Vec<u8>> {
    let text = serde_json::to_vec(content).map_err(|error| Error::argument("mpi", error.to_string()))?;
    if text.len() > most {
        let message = format!("what is to be said takes {} bytes, of which {most} are possible", text.len());
        return Err(Error::argument("mpi", message));
    }
    Ok(text)
}

/// What a text says, which may be followed by zeros.
pub(super) fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T> {
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    serde_json::from_slice(&text[..end])
        .map_err(|error| Error::argument("mpi", format!("a text that cannot be read: {error}")))
}
