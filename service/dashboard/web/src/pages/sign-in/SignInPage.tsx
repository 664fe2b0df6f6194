/** Where a service that asks for tokens is shown one: it answers with a cookie that no script can read. */

import { useState, type FormEvent } from "react";

import { requestJson } from "../../api/client.ts";
import { asApiError } from "../../api/resource.ts";
import { useTitle } from "../../components/title.ts";

export default function SignInPage() {
  useTitle("Sign in");
  const [token, setToken] = useState("");
  const [refusal, setRefusal] = useState<string | null>(null);
  const [isSending, setIsSending] = useState(false);

  async function signIn(event: FormEvent): Promise<void> {
    event.preventDefault();
    setIsSending(true);
    try {
      await requestJson("/session", { method: "POST", body: { token: token.trim() } });
      // Every page and the live stream begin anew, with the cookie.
      window.location.reload();
    } catch (error) {
      setRefusal(asApiError(error).message);
      setIsSending(false);
    }
  }

  return (
    <main className="page narrow" id="main" tabIndex={-1}>
      <form className="state-page" onSubmit={(event) => void signIn(event)}>
        <h2>This service asks for a token</h2>
        <p>
          <code>muonscope token create --name NAME --scope submit</code> on its machine makes one.
        </p>
        <label htmlFor="token">Token</label>
        <input
          id="token"
          className="field"
          type="password"
          autoComplete="off"
          spellCheck={false}
          required
          value={token}
          aria-invalid={refusal !== null}
          aria-describedby={refusal === null ? undefined : "refusal"}
          onChange={(event) => setToken(event.target.value)}
        />
        {refusal !== null && (
          <p id="refusal" role="alert">
            {refusal}
          </p>
        )}
        <button type="submit" className="btn" disabled={isSending}>
          Sign in
        </button>
      </form>
    </main>
  );
}
