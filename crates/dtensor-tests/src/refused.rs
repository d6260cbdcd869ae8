//! Assertions that a call returns an error whose message says what is wrong.

use dtensor::Result;

/// Asserts that a result is an error whose message contains all of these words.
#[track_caller]
pub fn refused<T>(result: Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, but expected an error with {words:?}") };
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

/// Asserts that a result is an error of `function` whose message contains all of these words.
#[track_caller]
pub fn refused_by<T>(result: Result<T>, function: &str, words: &[&str]) {
    if let Err(error) = &result {
        assert!(error.to_string().starts_with(&format!("{function}: ")), "{error} is not of {function}");
    }
    refused(result, words);
}
